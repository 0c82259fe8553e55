"""Which row of the device's state belongs to which running sequence.

    row    0   1   2   3
           B   –   A   C         A keeps row 2 for as long as it runs, whoever comes and goes beside it

Rows are given out when a step is launched. Whatever was submitted before then, in stream order, is done with them: a
row may change hands while a step with its former sequence is still on the device.
"""

from collections.abc import Iterable

from engine.sequence import Sequence, SequenceStatus


class RowSlots:
    """`num_rows` rows, as many as sequences may run at once.

    A sequence that ends or is preempted keeps its row until another needs it. So whoever keeps state by row has to see
    for himself whether what is in it is of the sequence that has it now.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(reversed(range(num_rows)))
        self._rows: dict[Sequence, int] = {}

    def __getitem__(self, sequence: Sequence) -> int:
        """The row of a sequence that has been in a step since it runs."""
        return self._rows[sequence]

    def take(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return the rows of sequences that run; those that have none are given one."""
        return [self._rows[sequence] if sequence in self._rows else self._give(sequence) for sequence in sequences]

    def _give(self, sequence: Sequence) -> int:
        if not self._free:
            idle = [held for held in self._rows if held.status is not SequenceStatus.RUNNING]
            self._free = [self._rows.pop(held) for held in idle]
        self._rows[sequence] = self._free.pop()
        return self._rows[sequence]
