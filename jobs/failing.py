"""The end of a job that can give no result: in storage too, so that a ledger that is rebuilt does not run it again."""

import logging

from pydantic import BaseModel, ConfigDict

from jobs.errors import ObjectNotFound, RowError, StorageError
from jobs.layout import JobLayout
from jobs.ledger import Ledger
from jobs.spec import JobSpec
from jobs.storage import Stores

log = logging.getLogger(__name__)


class Failure(BaseModel):
    """Why a job failed: the first errors, how many there are, and where all of them stand, if anywhere."""

    model_config = ConfigDict(frozen=True)

    errors: tuple[RowError, ...]
    count: int = 1
    url: str | None = None


def fail(spec: JobSpec, failure: Failure, ledger: Ledger, stores: Stores, *, from_state: str) -> None:
    """End a job that is in that state; one that is in another is left alone. Raises ServiceUnreachable."""
    reply = ledger.fail(
        spec.id, failure.errors, error_count=failure.count, error_url=failure.url, from_state=from_state
    )
    if reply != "ok":
        return
    try:
        stores.put(spec.layout.failure, failure.model_dump_json(exclude_none=True).encode())
    except StorageError as error:
        log.warning("job %s has failed, which only the ledger knows: %s", spec.id, error)


def stored_failure(layout: JobLayout, stores: Stores) -> Failure | None:
    """Why the job failed, where it did."""
    try:
        return Failure.model_validate_json(stores.read(layout.failure))
    except ObjectNotFound:
        return None
