"""`run-batch` is `vllm run-batch` by another name: its lines, its flags; and flags that mean nothing here say why."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import PagemillError
from jobs.spec import JobSpec, OpenAIRows
from jobs.vllm_lines import vllm_lines
from tests.jobs.commands import Command, commands
from tests.jobs.site import Site
from tests.jobs.specs import request
from tests.servers import ValkeyServer

GOOD = ("--model", "tiny", "-i", "in.jsonl", "-o", "out.jsonl")
ROWS = [request(custom_id=f"r{n}") if n % 3 else request({"stream": True}, custom_id=f"r{n}") for n in range(10)]


@pytest.fixture
def pagemill(
    site: Site,
    valkey: ValkeyServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Iterator[Command]:
    monkeypatch.chdir(tmp_path)
    yield from commands(site, valkey, monkeypatch, capfdbinary)


def lines_of(site: Site, spec: JobSpec) -> list[Any]:
    view = site.ledger.view(spec.id)
    files = [iter(site.stores.read(url).splitlines()) for url in (view.output_url, view.error_url) if url]
    found = vllm_lines(spec, view.rows or 0, files[0], files[1] if len(files) > 1 else iter(()))
    return [json.loads(line) for line in found]


def done(site: Site, rows: list[Any]) -> JobSpec:
    spec = site.submit(rows, rows=OpenAIRows())
    site.control.plan(spec.id)
    site.work(spec)
    site.control.assemble(spec.id)
    return spec


def test_every_row_has_its_line_in_order_whether_it_failed_or_not(site: Site) -> None:
    found = lines_of(site, done(site, ROWS))
    assert [line["custom_id"] for line in found] == [f"r{n}" for n in range(10)]
    assert [line["response"]["status_code"] for line in found] == [200 if n % 3 else 400 for n in range(10)]
    good, bad = found[1], found[0]
    assert set(good) == set(bad) == {"id", "custom_id", "response", "error"}
    assert good["error"] is None
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "answer 1"
    assert bad["response"]["body"] is None
    assert bad["error"]["error"]["code"] == 400
    assert bad["error"]["error"]["type"] == "BadRequestError"
    assert "Streaming" in bad["error"]["error"]["message"]
    assert len({line["id"] for line in found} | {line["response"]["request_id"] for line in found}) == 20
    assert all(line["id"].startswith("vllm-") for line in found)
    assert good["response"]["body"]["id"] == good["id"].replace("vllm-", "chatcmpl-")
    assert all(line["response"]["request_id"].startswith("vllm-batch-") for line in found)


def test_a_file_of_failures_and_a_file_without_any(site: Site) -> None:
    assert [line["response"]["status_code"] for line in lines_of(site, done(site, ROWS[:1]))] == [400]
    assert [line["response"]["status_code"] for line in lines_of(site, done(site, ROWS[1:3]))] == [200, 200]


def test_a_row_that_is_in_neither_file_is_an_error_and_not_a_shorter_result(site: Site) -> None:
    spec = done(site, ROWS[1:3])
    output = site.stores.read(site.ledger.view(spec.id).output_url).splitlines()
    with pytest.raises(PagemillError, match="Row 1 has no result"):
        list(vllm_lines(spec, 2, iter(output[:1]), iter(())))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size is not for pagemill: a model runs on one device"),
        (("--tensor_parallel_size=2",), "--tensor_parallel_size is not for pagemill"),
        (("-tp", "2"), "-tp is not for pagemill"),
        (("--tokenizer", "x"), "read from the model's own files"),
        (("--enable-metrics",), "there is no server"),
        (("--frobnicate",), "No such option: --frobnicate"),
        (("stray",), "Unexpected argument: stray"),
        (("--response-role", "robot"), "--response-role robot"),
    ],
)
def test_a_flag_that_means_nothing_here_is_refused_by_name(
    pagemill: Command, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    ended = pagemill("run-batch", *GOOD, *flags)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
    assert not (tmp_path / "out.jsonl.pagemill").exists()


def test_what_is_always_so_may_be_asked_for(pagemill: Command) -> None:
    """The input is what is missing then."""
    ended = pagemill("run-batch", *GOOD, "--enable-chunked-prefill", "--disable-log-requests", "--json")
    assert ended.error["code"] == "input_not_found"


def test_the_engine_gets_vllm_s_flags_by_its_own_names(
    pagemill: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def run_here(spec: JobSpec, config: Any, engine: Any, *, quiet: bool) -> Any:
        seen.extend([spec, engine])
        raise PagemillError("enough")

    # By its name, jobs.cli.run_batch is the command.
    monkeypatch.setattr(sys.modules["jobs.cli.run_batch"], "run_here", run_here)
    (tmp_path / "in.jsonl").write_text("{}\n")
    pagemill(
        *("run-batch", *GOOD, "--max-model-len", "2048", "--max-num-seqs", "64", "--dtype", "float32", "--seed", "7"),
        *("--no-enable-prefix-caching", "--swap-space", "4", "--enable-lora", "--served-model-name", "gpt"),
        *("--revision", "main"),
    )
    spec, engine = seen
    assert engine.argv == [
        *("--dtype", "float32", "--max-num-seqs", "64", "--max-model-len", "2048", "--no-enable-prefix-caching"),
        *("--max-loras", "1", "--max-lora-rank", "16", "--swap-space", str(4 * 1024**3)),
    ]
    assert (spec.id, spec.model, spec.model_aliases) == ("run-batch-7", "tiny@main", ("tiny", "gpt"))
    assert (spec.on_bad_row, spec.rows) == ("skip", OpenAIRows())
    another_seed = ("run-batch", *GOOD, "--revision", "main", "--served-model-name", "gpt", "--seed", "8")
    assert "holds a stopped run with another input or other options" in pagemill(*another_seed).err
    assert len(seen) == 2
    pagemill(*another_seed, "--fresh")
    assert seen[2].id == "run-batch-8"
