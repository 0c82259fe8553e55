"""How many blocks a sequence will want: by this much, and not by one free block, the scheduler admits the next one.

A prompt of 10 tokens, three continuations of it, an answer of 9 tokens expected, blocks of 4:

    block   0 ───────┐ 1 ───────┐ 2 ─────────┐ 3 ───────┐ 4 ───────┐
            p p p p  │ p p p p  │ p p a a    │ a a a a  │ a a a    │     the first continuation       5 blocks
            shared   │ shared   │ a copy     │ a a a a  │ a a a    │     each of the others           3 blocks more

A pool that is promised away to answers that then turn out shorter stands idle; one promised too lightly preempts, and
computes again. So the answers' length is estimated from those that have finished.
"""

from engine.sequence import Sequence


class BlockForecast:
    """Estimates how much of its `max_tokens` a sequence will use: the share that finished ones used.

    A moving average over about 16 sequences. It begins at 0.7, and every preemption takes it half of the way to 1,
    since preemption shows that the estimate was too low.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._share = 0.7

    def blocks(self, sequence: Sequence, num_continuations: int) -> int:
        """Blocks that `sequence` will hold in the end, together with the continuations forked from it as it is now."""
        last = -(-(sequence.num_tokens + self._remaining_tokens(sequence)) // self._block_size)
        shared = sequence.num_tokens // self._block_size
        return last + (num_continuations - 1) * (last - shared)

    def growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence, and what will be forked from it, will ask for before they end."""
        return max(0, self.blocks(sequence, sequence.num_continuations) - len(sequence.block_ids))

    def _remaining_tokens(self, sequence: Sequence) -> int:
        """The predicted number of tokens still to come: at least one, but none where the prompt is only pooled."""
        if sequence.request.pooler:
            return 0
        return max(1, int(self._share * sequence.request.max_tokens) - sequence.num_output_tokens)

    def record_finish(self, sequence: Sequence) -> None:
        self._share += (sequence.num_output_tokens / sequence.request.max_tokens - self._share) / 16

    def record_preemption(self) -> None:
        self._share = (self._share + 1) / 2
