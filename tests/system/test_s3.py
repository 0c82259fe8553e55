"""The same job through two S3 servers that differ in what they can do."""

from pathlib import Path

import pytest

from tests.servers import BUCKET, S3Server
from tests.system.mill import Mill, assert_every_row_once, questions, read_jsonl

pytestmark = pytest.mark.model


@pytest.mark.parametrize("server", ["moto_s3", "rclone_s3"])
def test_input_segments_and_output_in_a_bucket(server: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    s3: S3Server = request.getfixturevalue(server)
    storage = f"s3://{BUCKET}/{tmp_path.name}"
    source = questions(tmp_path, 20)
    with Mill(tmp_path, s3.environment() | {"PAGEMILL_STORAGE": storage}).up() as mill:
        output = f"s3://{BUCKET}/{tmp_path.name}-answers.jsonl"
        options = ("--prompt-column", "question", "--max-tokens", "8", "--output", output)
        job_id = mill.submit(source, *options)
        view = mill.wait_for_end(job_id)
        assert (view.state, view.done, view.output_url) == ("completed", 20, output)
        assert_every_row_once(source, read_jsonl(mill.pagemill("results", job_id).stdout))
    key = output.removeprefix(f"s3://{BUCKET}/")
    body = s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    assert_every_row_once(source, read_jsonl(body))
