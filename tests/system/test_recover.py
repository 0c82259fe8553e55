"""Redis loses everything under running services, and one command brings the job back."""

import json
from pathlib import Path

import pytest

from tests.system.mill import Mill, assert_every_row_once, questions, read_jsonl

pytestmark = pytest.mark.model


def test_a_job_goes_on_after_redis_was_emptied_under_the_workers(tmp_path: Path) -> None:
    source = questions(tmp_path, 64)
    # With more seats, all rows would be in work at once, and the job have no middle.
    with Mill(tmp_path).up("--max-num-seqs", "8") as mill:
        job_id = mill.submit(source, "--prompt-column", "question", "--max-tokens", "16", "--temperature", "0")
        mill.wait_for_work(job_id, rows=20)
        committed = mill.ledger.records(job_id)
        assert committed
        mill.ledger.client.flushall()
        assert mill.pagemill("status", job_id).returncode == 2
        recovered = json.loads(mill.pagemill("recover", "--json").stdout)["recovered"]
        assert [view["id"] for view in recovered] == [job_id]
        view = mill.wait_for_end(job_id)
        assert (view.state, view.done, view.failed) == ("completed", 64, 0)
        records = mill.ledger.records(job_id)
        assert {shard: records[shard] for shard in committed} == committed
        assert not set(mill.tries(job_id)) & {str(shard) for shard in committed}
        assert_every_row_once(source, read_jsonl(mill.pagemill("results", job_id).stdout))
