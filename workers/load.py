"""How full the engine's steps are while a shard is in work: a look at its counters at the beginning and at the end."""

from engine.info import EngineStats
from jobs.records import EngineLoad
from workers.host import EngineHost


class LoadMeter:
    """Counts from when it is made. The rows of all shards that are in work at the same time share the steps."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._before = host.stats()

    def read(self) -> EngineLoad | None:
        """None where no step was made, or the engine was started again meanwhile and counts from zero."""
        return _load(self._before, self._host.stats(), self._host.seats)


def _load(before: EngineStats, after: EngineStats, seats: int) -> EngineLoad | None:
    steps, rows = after.steps - before.steps, after.step_rows - before.step_rows
    if steps <= 0 or rows < 0:
        return None
    in_tail = (after.tail_steps - before.tail_steps) * seats - (after.tail_step_rows - before.tail_step_rows)
    return EngineLoad(rows=round(rows / steps, 2), seats=seats, tail_idle=round(in_tail / (steps * seats), 4))
