"""How the ledger writes what it holds of a job: the fields of its hash."""

import json
from collections.abc import Sequence
from typing import Any, cast

from jobs.errors import RowError
from jobs.records import TERMINAL, JobView, Manifest, SegmentRecord, Usage
from jobs.spec import JobSpec, load_spec

COUNTERS = ("done", "failed", "prompt_tokens", "completion_tokens", "cached_tokens")
"""As the scripts that count have them too."""


TERMS = ("priority", "weight", "expires_at")
"""What `set` changes, in fields of their own."""


def spec_of(fields: dict[str, str]) -> JobSpec:
    """The job's spec, on the terms that it has now. Raises UnreadableJob."""
    spec = load_spec(fields["spec"], "What the ledger has of a job")
    terms = spec.terms.model_validate({**spec.terms.model_dump(), "expires_at": None, **_given(fields)})
    return spec.model_copy(update={name: getattr(terms, name) for name in TERMS})


def _given(fields: dict[str, str]) -> dict[str, str]:
    return {name: fields[name] for name in TERMS if name in fields}


def view_of(spec: JobSpec, fields: dict[str, str], in_flight: int, leased: int) -> JobView:
    """The job as people see it."""

    def number(name: str) -> int | None:
        return int(fields[name]) if name in fields else None

    state = cast(Any, fields["state"])
    return JobView(
        id=spec.id,
        state=state,
        model=spec.model,
        created_at=spec.created_at,
        tenant=spec.tenant,
        priority=spec.priority,
        weight=spec.weight,
        parent=spec.parent.job_id if spec.parent else None,
        paused="paused" in fields,
        expires_at=spec.expires_at,
        rows=number("rows"),
        done=number("done") or 0,
        failed=number("failed") or 0,
        in_flight=in_flight,
        shards=number("total"),
        settled=number("settled") or 0,
        leased=leased,
        usage=Usage(**{name: number(name) or 0 for name in COUNTERS[2:]}),
        in_progress_at=number("in_progress_at"),
        started_at=number("started_at"),
        finalizing_at=number("finalizing_at"),
        ended_at=number(f"{state}_at") if state in TERMINAL else None,
        output_url=fields.get("output_url", spec.output_url),
        error_url=fields.get("error_url") or None,
        remaining_url=fields.get("remaining_url") or None,
        errors=tuple(RowError.model_validate(error) for error in json.loads(fields.get("errors", "[]"))),
        error_count=number("error_count") or 0,
    )


def counts(of: SegmentRecord | Manifest) -> list[int]:
    """In the order of `COUNTERS`."""
    usage = of.usage
    return [of.ok, of.failed, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]


def result_fields(manifest: Manifest) -> dict[str, Any]:
    """What a manifest says of the result."""
    return {
        **dict(zip(COUNTERS, counts(manifest), strict=True)),
        "output_url": manifest.output.url,
        "error_url": manifest.errors.url if manifest.errors else "",
        "remaining_url": manifest.remaining or "",
    }


def dump_errors(errors: Sequence[RowError]) -> str:
    """The errors as `view_of` reads them."""
    return json.dumps([error.model_dump(exclude_none=True) for error in errors])
