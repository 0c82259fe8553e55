"""What fits is known before any weight is read, and is what an engine that is built then has."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.capacity import kv_capacity
from engine.config import EngineConfig
from engine.llm import LLM
from engine.machine import available_memory
from engine.row_state import row_state_bytes
from tests.engine.encoder_fixture import tiny_encoder
from tests.engine.models_fixture import TINY, tiny_llama

BYTES_PER_TOKEN = 2 * TINY["num_hidden_layers"] * TINY["num_key_value_heads"] * TINY["head_dim"] * 4
GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("capacity") / "model", dtype="float32")


def test_an_engine_that_is_built_has_the_capacity_that_was_told(model: Path) -> None:
    config = EngineConfig(str(model), device="cpu", max_num_seqs=5)
    found = kv_capacity(config)
    assert found is not None
    built = LLM(str(model), device="cpu", max_num_seqs=5, num_threads=1).info
    pool = (built.num_kv_blocks - 1) * built.block_size
    assert (found.kv_tokens, found.max_model_len) == (pool, built.max_model_len)
    assert (found.max_num_seqs, found.block_size) == (built.max_num_seqs, built.block_size)
    assert found.kv_bytes_per_token == BYTES_PER_TOKEN
    assert found.weight_bytes == sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())


def test_half_the_dtype_is_half_the_bytes(model: Path) -> None:
    whole = kv_capacity(EngineConfig(str(model)), GIB)
    half = kv_capacity(EngineConfig(str(model), dtype="bfloat16"), GIB)
    assert whole is not None
    assert half is not None
    assert (half.weight_bytes * 2, half.kv_bytes_per_token * 2) == (whole.weight_bytes, whole.kv_bytes_per_token)


def test_a_gpu_is_filled_up_to_its_share_less_the_weights(model: Path) -> None:
    config = EngineConfig(str(model), gpu_memory_utilization=0.5)
    found = kv_capacity(config, GIB)
    assert found is not None
    room = GIB // 2 - found.weight_bytes - row_state_bytes(found.max_num_seqs, found.max_model_len, found.block_size)
    assert 0 <= room - found.kv_tokens * BYTES_PER_TOKEN < 2 * found.block_size * BYTES_PER_TOKEN
    usual = kv_capacity(replace(config, gpu_memory_utilization=None), GIB)
    assert usual is not None
    assert usual.kv_tokens > 1.7 * found.kv_tokens
    assert usual.max_num_seqs > 500


@pytest.mark.parametrize("gpu_memory", [1000, None])
def test_a_model_that_does_not_fit_has_no_room_for_a_token(
    gpu_memory: int | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.memory.available_memory", lambda: 1000)
    found = kv_capacity(EngineConfig(str(model), device="cpu"), gpu_memory)
    assert found is not None
    assert (found.kv_tokens, found.max_model_len) == (0, 0)
    assert available_memory() > 1000


def test_what_has_no_kv_cache_or_is_not_read_by_the_engine_has_none(tmp_path: Path, model: Path) -> None:
    assert kv_capacity(EngineConfig(str(tiny_encoder(tmp_path / "bert", "bert")))) is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["NobodyKnowsItForCausalLM"], "model_type": "nobody"}')
    assert kv_capacity(EngineConfig(str(other))) is None


@pytest.mark.model
def test_a_gguf_file_counts_as_what_it_is_dequantised_to() -> None:
    found = kv_capacity(EngineConfig("demo"), 24 * GIB)
    assert found is not None
    assert found.weight_bytes == pytest.approx(2 * 134.5e6, rel=0.01)
    assert found.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
