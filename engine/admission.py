"""How many blocks a sequence will want: by this much, and not by one free block, the scheduler admits the next one.

A prompt of 10 tokens, three continuations of it, an answer of 9 tokens expected, blocks of 4:

    block   0 ───────┐ 1 ───────┐ 2 ─────────┐ 3 ───────┐ 4 ───────┐
            p p p p  │ p p p p  │ p p a a    │ a a a a  │ a a a    │     the first continuation       5 blocks
            shared   │ shared   │ a copy     │ a a a a  │ a a a    │     each of the others           3 blocks more

A pool that is promised away to answers that then turn out shorter stands idle; one promised too lightly preempts, and
computes again. So the answers' length is estimated from those that have finished.

The same estimate says which of the waiting requests are likely to run longest.
"""

from collections import OrderedDict

from engine.request import Request
from engine.sequence import Sequence

_FIRST_SHARE = 0.7
# A worker meets one group after the other, a job each.
_MOST_GROUPS = 1024


class OutputForecast:
    """Estimates how much of its `max_tokens` a sequence will use: the share that finished ones of its group used.

    A moving average over about 16 sequences of the group. It begins at that over all groups, and that begins at 0.7.
    Every preemption takes all of them half of the way to 1, since preemption shows that the estimate was too low.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._overall = _FIRST_SHARE
        self._shares: OrderedDict[str, float] = OrderedDict()  # by group, the one that was used longest ago first

    def output_tokens(self, request: Request) -> int:
        """The predicted length of a continuation: at least one token, but none where the prompt is only pooled."""
        if request.pooler:
            return 0
        return max(1, int(self._shares.get(request.group, self._overall) * request.max_tokens))

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
        return max(1, self.output_tokens(sequence.request) - sequence.num_output_tokens)

    def record_finish(self, sequence: Sequence) -> None:
        group = sequence.request.group
        used = sequence.num_output_tokens / sequence.request.max_tokens
        share = self._shares.get(group, self._overall)
        self._shares[group] = share + (used - share) / 16
        self._shares.move_to_end(group)
        if len(self._shares) > _MOST_GROUPS:
            self._shares.popitem(last=False)
        self._overall += (used - self._overall) / 16

    def record_preemption(self) -> None:
        self._overall = (self._overall + 1) / 2
        for group, share in self._shares.items():
            self._shares[group] = (share + 1) / 2
