"""What pagemill tells people when something cannot be done.

Two kinds, kept apart: a `PagemillError` ends a command or a job; a `RowError` is a value that takes the place of
one row's result.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

EXIT_DONE, EXIT_JOB_FAILED, EXIT_USAGE, EXIT_ROWS_FAILED, EXIT_UNREACHABLE = 0, 1, 2, 3, 4


class PagemillError(Exception):
    """The base of all errors that pagemill raises on purpose.

    `code` is stable and machine-readable, `hint` says what to do (or is empty), `exit_code` is the command's.
    """

    code = "pagemill_error"
    exit_code = EXIT_JOB_FAILED

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or type(self).code

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "hint": self.hint}


class UsageError(PagemillError):
    """The caller asked for something that makes no sense: a bad flag, a missing file, an unknown job."""

    code = "usage"
    exit_code = EXIT_USAGE


class ServiceUnreachable(PagemillError):
    """Redis or the object store does not answer; the message carries the address, without its password."""

    code = "service_unreachable"
    exit_code = EXIT_UNREACHABLE


class StorageError(PagemillError):
    """An object cannot be read or written: it is missing, or access to it is refused."""

    code = "storage"
    exit_code = EXIT_USAGE


class ObjectNotFound(StorageError):
    """There is no object under that URL."""

    code = "not_found"


class PreconditionFailed(StorageError):
    """The object is not the one that the caller expected: it exists already, or it has changed."""

    code = "precondition_failed"


class InputChanged(PagemillError):
    """The input object was overwritten after its job was planned."""

    code = "input_changed"


class UnreadableJob(PagemillError):
    """A job is written as this version does not know: another one has to work on it."""

    code = "unreadable_job"


class IdempotencyConflict(PagemillError):
    """Another job was submitted under the same idempotency key."""

    code = "idempotency_conflict"
    exit_code = EXIT_USAGE


class OutputTaken(UsageError):
    """A job that has not ended writes the same file, or folder of parts."""

    code = "output_taken"


class LedgerFull(PagemillError):
    """Redis has no room for another job."""

    code = "ledger_full"
    exit_code = EXIT_UNREACHABLE


class JobFailed(PagemillError):
    """The job ended without a result file."""

    code = "job_failed"


class RowError(BaseModel):
    """Why one row has no result: what is wrong, with which field, and where in the input.

    `line` is 1-based; in Parquet it is the row. `byte` is the 0-based offset of that line's first byte, where lines
    have one: in a compressed file, of what it holds. `file` is the file, where the input has several. `param` is a
    dotted path into the row.
    """

    model_config = ConfigDict(frozen=True)

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    byte: int | None = None
    custom_id: str | None = None
    file: str | None = None
