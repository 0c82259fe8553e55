"""What a job's owner orders after the submit: obeyed by the ledger at once, and kept in storage for the next ledger.

    jobs/<id>/orders/paused        there for as long as the job is to be held
    jobs/<id>/orders/cancelled     there once it is to end
    jobs/<id>/orders/terms.json    priority, weight and deadline, where they are no longer the spec's

First the ledger, which may refuse, then storage. A command that stops between the two fails, and is to be given again:
until then the order holds for as long as this ledger does.
"""

from dataclasses import dataclass
from typing import Literal

from jobs.layout import JobLayout
from jobs.ledger import Ledger
from jobs.spec import JobSpec, Terms
from jobs.storage import Stores

_PAUSED, _CANCELLED, _TERMS = "paused", "cancelled", "terms.json"
_CHANGED = {"priority", "weight", "expires_at"}


@dataclass(frozen=True, slots=True)
class Orders:
    """Those of one job that stand."""

    paused: bool = False
    cancelled: bool = False
    terms: Terms | None = None

    def applied_to(self, spec: JobSpec) -> JobSpec:
        """The spec on the terms that were ordered last."""
        return spec if self.terms is None else spec.model_copy(update=self.terms.model_dump(include=_CHANGED))


def standing_orders(layout: JobLayout, stores: Stores) -> Orders:
    """What storage knows of a job's orders."""
    names = {info.url.removeprefix(layout.orders) for info in stores.list(layout.orders)}
    terms = Terms.model_validate_json(stores.read(layout.orders + _TERMS)) if _TERMS in names else None
    return Orders(_PAUSED in names, _CANCELLED in names, terms)


def pause(job_id: str, ledger: Ledger, stores: Stores) -> str:
    """Hand out no more shards of a job. 'ok', or the state that forbids it. Raises what the storage raises."""
    layout = ledger.spec(job_id).layout
    if (reply := ledger.pause(job_id)) == "ok":
        stores.put(layout.orders + _PAUSED, b"")
    return reply


def resume(job_id: str, ledger: Ledger, stores: Stores) -> str:
    """Go on with a job that may be paused. 'ok', or the state that forbids it."""
    layout = ledger.spec(job_id).layout
    if (reply := ledger.resume(job_id)) == "ok":
        stores.delete([layout.orders + _PAUSED])
    return reply


def cancel(job_id: str, ledger: Ledger, stores: Stores) -> str:
    """Stop a job. 'ok', or the state that forbids it."""
    layout = ledger.spec(job_id).layout
    if (reply := ledger.cancel(job_id)) == "ok":
        stores.put(layout.orders + _CANCELLED, b"")
    return reply


def set_terms(
    job_id: str,
    ledger: Ledger,
    stores: Stores,
    *,
    priority: int | None = None,
    weight: float | None = None,
    expires_at: int | Literal["never"] | None = None,
) -> str:
    """Change a job's place in the queue and its deadline. 'ok', or the state that forbids it."""
    layout = ledger.spec(job_id).layout
    reply = ledger.set_terms(job_id, priority=priority, weight=weight, expires_at=expires_at)
    if reply == "ok":
        stores.put(layout.orders + _TERMS, ledger.spec(job_id).terms.model_dump_json().encode())
    return reply
