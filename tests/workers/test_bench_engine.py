"""The workloads are what they are said to be, their operations are counted right, and the command measures them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from engine.config import EngineConfig
from engine.models.config import LayerConfig
from tests.engine.models_fixture import byte_tokenizer, tiny_llama
from workers import bench_ceilings, bench_engine, bench_kernels
from workers.bench import bench
from workers.bench_ceilings import GemmCeilings
from workers.bench_engine import savable_tokens
from workers.bench_flops import _pairs, flops, read_model_config, workload_flops
from workers.bench_peer import find_peer
from workers.bench_workloads import Row, TokenIds, Workload, build_workloads, distinct_prompt_tokens


def encode(text: str) -> TokenIds:
    return byte_tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"]


@pytest.fixture(scope="module")
def workloads() -> dict[str, Workload]:
    return build_workloads(encode)


def prompts(workload: Workload) -> list[TokenIds]:
    return [row.prompt for row in workload.rows]


def test_the_workloads_have_the_rows_and_lengths_that_they_are_defined_by(workloads: dict[str, Workload]) -> None:
    shapes = {
        name: (len(w.rows), {len(row.prompt) for row in w.rows}, {row.new_tokens for row in w.rows})
        for name, w in workloads.items()
    }
    rows, lengths, new = shapes.pop("W1")
    assert (rows, min(lengths) >= 32, max(lengths) <= 512, min(new) >= 16, max(new) <= 192) == (96, *[True] * 4)
    assert len(lengths) > 40
    assert shapes == {
        "W2": (96, {576}, {32}),
        "W3": (48, {1024}, {16}),
        "W4": (64, {32}, {256}),
        "W5": (200, {732}, {24}),
    }


def test_the_same_work_is_built_again(workloads: dict[str, Workload]) -> None:
    assert build_workloads(encode) == workloads


def test_another_edition_has_the_same_lengths_and_shares_no_block_of_16(workloads: dict[str, Workload]) -> None:
    other = build_workloads(encode, edition=1)
    for name, workload in workloads.items():
        assert [(len(r.prompt), r.new_tokens) for r in other[name].rows] == [
            (len(r.prompt), r.new_tokens) for r in workload.rows
        ]
        heads = {tuple(prompt[:16]) for prompt in prompts(workload)}
        assert not heads & {tuple(prompt[:16]) for prompt in prompts(other[name])}


def test_shared_prefixes_are_shared_and_nothing_else_is(workloads: dict[str, Workload]) -> None:
    assert len({tuple(prompt[:512]) for prompt in prompts(workloads["W2"])}) == 1
    assert len({tuple(prompt[:528]) for prompt in prompts(workloads["W2"])}) == 96
    tree = prompts(workloads["W5"])
    assert [len({tuple(prompt[:depth]) for prompt in tree}) for depth in (600, 700, 732)] == [10, 50, 200]
    for name in ("W1", "W3", "W4"):
        assert len({tuple(prompt[:16]) for prompt in prompts(workloads[name])}) == len(workloads[name].rows)


def test_the_tree_is_shuffled_and_its_pool_holds_a_quarter_of_it(workloads: dict[str, Workload]) -> None:
    tree = workloads["W5"]
    runs = sum(one[:600] != other[:600] for one, other in zip(prompts(tree), prompts(tree)[1:], strict=False))
    assert runs > 100
    assert tree.kv_tokens == (distinct_prompt_tokens(prompts(tree)) + tree.new_tokens) // 4
    assert [w.kv_tokens for name, w in workloads.items() if name != "W5"] == [None] * 4


def test_a_share_of_the_work_keeps_the_first_rows(workloads: dict[str, Workload]) -> None:
    part = build_workloads(encode, scale=0.1)
    assert {name: len(w.rows) for name, w in part.items()} == {"W1": 10, "W2": 10, "W3": 5, "W4": 7, "W5": 20}
    assert all(w.rows == workloads[name].rows[: len(w.rows)] for name, w in part.items())


def test_distinct_tokens_count_a_shared_prefix_once_and_a_last_token_always() -> None:
    assert distinct_prompt_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [9]]) == 3 + 1 + 2 + 1


def test_savable_tokens_are_whole_blocks_that_another_row_computed() -> None:
    shared = list(range(10))
    rows = [Row([*shared, 50], 1), Row([*shared, 60], 1), Row(shared[:8], 1)]
    # The second finds two blocks of four; the third one, for its last token it computes itself.
    assert savable_tokens(Workload("", "", tuple(rows)), block_size=4) == 8 + 4


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(path, attn_implementation="eager")
    config = read_model_config(EngineConfig(str(path)))
    assert config is not None
    # A token at a time, so that no product computes what causal attention would throw away.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = None
        for token in (5, 6, 7, 8, 9):
            cache = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).past_key_values
    assert counter.get_total_flops() == flops(config, [(0, 5)], samples=5).total


def test_a_workloads_operations_count_a_shared_prefix_once(tmp_path: Path) -> None:
    config = read_model_config(EngineConfig(str(tiny_llama(tmp_path / "model"))))
    assert config is not None
    prefix = list(range(20))
    workload = Workload("", "", (Row([*prefix, 30, 31], 3), Row([*prefix, 40], 2)))
    # Of the first 22 + 2 positions, of the second those from 20 to 22; the last new token is not computed from.
    assert workload_flops(config, workload) == flops(config, [(0, 24), (20, 22)], samples=5)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
def test_pairs_are_the_keys_that_each_query_sees(window: int | None) -> None:
    for start, end in ((0, 9), (3, 9), (6, 7), (8, 20)):
        seen = sum(min(position + 1, window or position + 1) for position in range(start, end))
        assert _pairs(LayerConfig(rope=None, window=window), start, end) == seen


def test_the_command_measures_each_workload_and_the_tree_in_both_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_engine, "measure_gemm", lambda device: GemmCeilings(bf16=4e9, int8=8e9, fp32=2e9))
    model = str(tiny_llama(tmp_path / "model", tokenizer=True, max_position_embeddings=2048))
    options = ["--device", "cpu", "--num-threads", "1", "--max-num-seqs", "8", "--scale", "0.02"]
    ran = CliRunner().invoke(bench, ["engine", "--model", model, *options, "--json"])
    assert ran.exit_code == 0, ran.output
    runs = json.loads(ran.stdout)
    assert [run["title"] for run in runs][-2:] == ["tree", "tree, as submitted"]
    assert [(run["name"], run["rows"], run["new_tokens"]) for run in runs][1:] == [
        ("W2", 2, 64),
        ("W3", 1, 16),
        ("W4", 2, 512),
        ("W5", 4, 96),
        ("W5", 4, 96),
    ]
    for run in runs:
        assert run["seconds"] > 0
        assert run["floor_seconds"] == pytest.approx(run["flops"] / 2e9)
        assert run["share"] == pytest.approx(run["floor_seconds"] / run["seconds"])
    assert (runs[1]["cached_tokens"], runs[1]["savable_tokens"]) == (512, 512)
    assert [run["peer"] for run in runs] == [*[""] * 4, "as submitted", ""]
    assert runs[4]["ratio"] == runs[5]["seconds"] / runs[4]["seconds"]
    shown = CliRunner().invoke(bench, ["engine", "W4", "--model", model, *options])
    assert "W4 decode-heavy" in shown.stdout
    assert "Ceilings before W4" in shown.stdout
    alone = CliRunner().invoke(
        bench, ["engine", "W5", "--model", model, *options, "--scheduling-policy", "fcfs", "--json"]
    )
    assert [(run["title"], run["peer"]) for run in json.loads(alone.stdout)] == [("tree", "")]


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    ran = CliRunner().invoke(bench, ["engine", "--model", str(tiny_llama(tmp_path / "model"))])
    assert "comes without a tokenizer" in str(ran.exception)


def test_an_interpreter_without_peers_is_told_from_none_at_all() -> None:
    assert find_peer(sys.executable) is None
    with pytest.raises(Exception, match="cannot be run"):
        find_peer("/no/such/python")


def test_kernels_are_measured_beside_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "_ROWS", (1, 3))
    monkeypatch.setattr(bench_kernels, "_DECODE", ((2, 40),))
    monkeypatch.setattr(bench_kernels, "_PREFILL", ((2, 33),))
    monkeypatch.setattr(bench_kernels, "_SECONDS_EACH", 0.001)
    # Products and buffers that take no time: what they say of the machine is not what is tested.
    monkeypatch.setattr(bench_ceilings, "_GEMM", 64)
    monkeypatch.setattr(bench_ceilings, "_BUFFER_BYTES", 1 << 20)
    model = str(tiny_llama(tmp_path / "model"))
    ran = CliRunner().invoke(bench, ["kernels", "--model", model, "--num-threads", "1", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    names = {run["name"] for run in found["kernels"]}
    assert names >= {"qkv", "lm_head", "decode attention", "prefill attention", "add + RMSNorm", "RoPE", "KV write"}
    assert all(run["seconds"] > 0 and run["bound"] in ("products", "memory") for run in found["kernels"])
    for step in found["steps"]:
        assert step["linear"] > 0
        assert step["attention"] > 0
        assert step["glue"] > 0
        assert step["linear"] + step["attention"] + step["glue"] + step["other"] == pytest.approx(1)
