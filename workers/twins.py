"""Rows of a shard that ask for the same thing: the first is asked, and its answer is that of the others too."""

from jobs.errors import RowError
from jobs.planner import PlannedRow
from jobs.pooling import Pooling
from jobs.results import Outcome
from jobs.rows import Row
from jobs.sampling import Sampling
from jobs.spec import Dedupe

_Request = tuple[object, ...]


class Twins:
    """What was asked in one shard. It holds the answer to each distinct request for as long as the shard is in work."""

    def __init__(self, dedupe: Dedupe) -> None:
        self._dedupe = dedupe
        self._answers: dict[_Request, Outcome] = {}
        self._waiting: dict[_Request, list[PlannedRow]] = {}

    def answer(self, row: Row) -> Outcome | None:
        """The answer to an earlier row that asked for the same."""
        if not self._may_share(row):
            return None
        found = self._answers.get(_request(row))
        return None if found is None else _as_of(row, found)

    def wait(self, planned: PlannedRow, row: Row) -> bool:
        """Whether a row that asked for the same is being answered, and this one will be with it. Else this one is."""
        if not self._may_share(row):
            return False
        request = _request(row)
        if request in self._waiting:
            self._waiting[request].append(planned)
            return True
        self._waiting[request] = []
        return False

    def settle(self, row: Row, outcome: Outcome) -> list[tuple[PlannedRow, Outcome]]:
        """The rows that waited for this one's answer, with their answers."""
        if not self._may_share(row):
            return []
        request = _request(row)
        self._answers[request] = outcome
        return [(planned, _as_of(planned.row, outcome)) for planned in self._waiting.pop(request)]

    def _may_share(self, row: Row) -> bool:
        if self._dedupe == "exact":
            return isinstance(row.params, Pooling) or _is_determined(row.params)
        return self._dedupe == "all"


def _request(row: Row) -> _Request:
    return row.kind, _frozen(row.prompts), row.params, row.lora


def _is_determined(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.seed is not None


def _frozen(value: object) -> object:
    """The same in values that can be hashed, `1` and `True` told apart."""
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return type(value), value


def _as_of(row: Row | RowError, outcome: Outcome) -> Outcome:
    """The outcome as that of another row, whose place an error names."""
    if not isinstance(outcome, RowError):
        return outcome
    offset = row.offset if isinstance(row, Row) else row.byte
    return outcome.model_copy(update={"line": row.line, "byte": offset, "custom_id": row.custom_id, "file": row.file})
