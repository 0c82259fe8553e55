"""Who comes first, and who is who: priorities, and jobs of the same moment."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jobs import spec as spec_module
from jobs.errors import OutputTaken
from jobs.spec import RecordRows, new_job_id
from jobs.submit import enter, prepare
from tests.jobs.site import Site, prompts

PRIORITIES = [0, 3, -5, 9, 4, 1000, 6, 5, -1000, 10]


def test_every_priority_is_a_priority_and_the_highest_comes_first(site: Site) -> None:
    """celery#4028, #8967: on Redis, Celery's ten priorities are four lists, 0 is the highest of them where the other
    brokers have it the lowest, and a message that is queued keeps the priority that it came with."""
    specs = {priority: site.planned(4, priority=priority) for priority in PRIORITIES}
    assert site.ledger.set_terms(specs[-1000].id, priority=2000) == "ok"
    leased = []
    while (lease := site.lease(specs[0])) is not None:
        leased.append(lease.job_id)
    order = [-1000, *sorted(PRIORITIES, reverse=True)[:-1]]
    assert leased == [specs[priority].id for priority in order]


def test_jobs_of_the_same_moment_have_ids_files_and_outputs_of_their_own(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HADOOP-17318, SPARK-33402: ids were made of the time in seconds, and of two jobs that began in the same second
    one wrote over the other's files."""
    monkeypatch.setattr(spec_module.time, "time_ns", lambda: 1_700_000_000_000_000_000)
    assert len({new_job_id() for _ in range(10_000)}) == 10_000
    source = f"{site.settings.state_dir}/in.jsonl"
    with open(source, "w") as file:
        file.write('{"prompt": "question 0"}\n')
    together = threading.Barrier(8)

    def submit(_: int) -> Any:
        together.wait(20)
        rows = RecordRows(prompt_column="prompt")
        spec = prepare(source, model="tiny", stores=site.stores, settings=site.settings, rows=rows)
        return enter(spec, site.ledger, site.stores, site.tokens)

    with ThreadPoolExecutor(8) as pool:
        specs = list(pool.map(submit, range(8)))
    assert len({spec.created_at for spec in specs}) <= 2
    for field in ("id", "output_url", "error_url"):
        assert len({getattr(spec, field) for spec in specs}) == 8
    for spec in specs:
        site.control.plan(spec.id)
    site.work(specs[0])
    for spec in specs:
        site.control.assemble(spec.id)
        assert len(site.rows(spec.output_url)) == 1
    again = site.submit(prompts(4), output_url="file:///same.jsonl", error_url="file:///same.errors.jsonl")
    with pytest.raises(OutputTaken, match=again.id):
        site.submit(prompts(4), output_url="file:///same.jsonl", error_url="file:///other.errors.jsonl")
