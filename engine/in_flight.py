"""The steps on the device, whose results are not entered yet: what they keep, and where they bring their sequences."""

from collections.abc import Iterable

from engine.block_tables import BlockTables
from engine.blocks import BlockHash
from engine.plan import PlanRow, StepPlan
from engine.sequence import Sequence

# Rows that cannot be planned ahead run every second step, in the company of those that could. Where they are more than
# this share of a step, the next one waits for all of them.
_MOST_LEFT_BEHIND = 0.25


class StepsInFlight:
    """Steps that were launched, and neither committed nor cancelled: at most two, and one whenever a step is planned.

    Until a step ends its rows keep their blocks. Sequences that finish meanwhile linger here.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._plans: list[StepPlan] = []
        self.lingering: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._plans)

    def begin(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def end(self, plan: StepPlan) -> None:
        """Without effect for a step that was never begun, and is run all at once."""
        self._plans = [begun for begun in self._plans if begun is not plan]
        lingering, self.lingering = self.lingering, []
        self.let_go(lingering)

    def let_go(self, finished: list[Sequence]) -> None:
        """Take the blocks of finished sequences, as soon as no step has a row of them."""
        if not finished:
            return
        in_flight = {row.sequence for row in self._rows()}
        for sequence in finished:
            if sequence in in_flight:
                self.lingering.append(sequence)
            else:
                self._tables.forget(sequence)

    def filled_blocks(self) -> set[BlockHash]:
        """The hashes of the blocks that will be findable when the steps are committed."""
        return self._tables.filled_by(row for row in self._rows() if not row.sequence.finished)

    def anticipate(self) -> bool:
        """Bring the sequences to where the step will have brought them; False if too few of them can go on from there.

        A placeholder stands for the token that is drawn, unless it is known to be the last one. Where a prompt forks,
        and for a beam, the tokens themselves decide what comes next.
        """
        num_rows = num_left_behind = 0
        for row in self._rows():
            num_rows += 1
            sequence = row.sequence
            # An earlier call may have brought it there, whose plan was not launched.
            if sequence.finished or sequence.num_computed_tokens > row.start:
                continue
            self._tables.anticipate(row)
            if row.num_samples == 1 and not sequence.request.beams:
                if sequence.num_output_tokens + 1 < sequence.request.max_tokens:
                    sequence.append_placeholder()
            elif row.num_samples:
                num_left_behind += 1
        return num_left_behind <= _MOST_LEFT_BEHIND * num_rows

    def _rows(self) -> Iterable[PlanRow]:
        return (row for plan in self._plans for row in plan.rows)
