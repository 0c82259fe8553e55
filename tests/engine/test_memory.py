"""How large the KV pool becomes, and the full step that measures what it must leave free."""

import psutil
import pytest
import torch

from engine import ConfigError, EngineConfig, build, memory
from engine.loader import load
from tests.engine.models_fixture import tiny_llama

CPU = torch.device("cpu")


def size(available, monkeypatch, config=None, **options):
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    arguments = {"bytes_per_token": 1000, "tokens_per_request": 8192, "max_num_seqs": 10, **options}
    return memory.size_kv_pool(config or EngineConfig("m"), CPU, run_full_step=lambda: None, **arguments)


def test_on_a_cpu_the_pool_is_half_of_what_is_left(monkeypatch):
    assert size(6_400_000, monkeypatch) == 3_200_000 // 32_000


def test_on_a_large_machine_it_is_what_the_rows_may_use(monkeypatch):
    assert size(10**12, monkeypatch) == 10 * 1024 // 32
    assert size(10**12, monkeypatch, tokens_per_request=64) == 10 * 64 // 32


def test_a_size_that_was_asked_for_is_taken(monkeypatch):
    assert size(0, monkeypatch, EngineConfig("m", num_kv_blocks=7)) == 7
    assert size(0, monkeypatch, EngineConfig("m", kv_cache_memory=320_000)) == 10


def test_no_room_is_an_error_that_says_how_little_there_is(monkeypatch):
    with pytest.raises(ConfigError, match="With 5 MiB there is no room"):
        size(10 * 2**20, monkeypatch, bytes_per_token=10**6)


def test_no_room_on_a_gpu_is_an_error_that_names_other_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**30)
    config, options = EngineConfig("m", kv_cache_memory=1), {"tokens_per_request": 1, "max_num_seqs": 1}
    with pytest.raises(ConfigError, match=r"Other processes use 20\.0 of the GPU's 24\.0 GiB"):
        memory.size_kv_pool(config, torch.device("cuda"), bytes_per_token=1000, run_full_step=lambda: None, **options)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 23 * 2**30)
    with pytest.raises(ConfigError) as nobody_else:
        memory.size_kv_pool(config, torch.device("cuda"), bytes_per_token=1000, run_full_step=lambda: None, **options)
    assert "Other processes" not in str(nobody_else.value)


def test_a_gpu_that_is_full_while_loading_is_a_configuration_error(monkeypatch):
    def full(config, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Process 7 has 70 GiB memory in use.")

    monkeypatch.setattr(build, "_load_and_assemble", full)
    with pytest.raises(ConfigError, match=r"do not fit the GPU: .* Process 7 has 70 GiB"):
        build.build_engine(EngineConfig("m", num_threads=1))


def test_launching_ahead_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match="async_scheduling is for GPUs"):
        build.build_engine(EngineConfig("m", device="cpu", async_scheduling=True))


@pytest.mark.parametrize("name", ["async_scheduling", "enforce_eager"])
def test_switches_are_yes_or_no(name):
    with pytest.raises(ConfigError, match=f"{name} must be True"):
        EngineConfig("m", **{name: 1})


def test_host_memory_is_kept_for_preempted_requests_only_beside_a_gpu(monkeypatch):
    def blocks(device, available, **options):
        monkeypatch.setattr(memory, "available_memory", lambda: available)
        return memory.size_host_pool(EngineConfig("m", **options), torch.device(device), bytes_per_token=2**15)

    # Blocks of a MiB, one of them the null block.
    assert blocks("cpu", 2**40) == 0
    assert blocks("cuda", 2**40) == 4 * 1024 - 1
    assert blocks("cuda", 2**32) == 1024 - 1, "a quarter of what the machine has left"
    assert blocks("cuda", 2**40, swap_space=0) == 0
    assert blocks("cpu", 0, swap_space=8 * 2**20) == 7


def test_swap_space_that_holds_nothing_is_an_error():
    with pytest.raises(ConfigError, match="does not hold two blocks of 32 tokens"):
        memory.size_host_pool(EngineConfig("m", swap_space=2**20), CPU, bytes_per_token=2**15)
    with pytest.raises(ConfigError, match="swap_space must be an integer of at least 0"):
        EngineConfig("m", swap_space=-1)


def test_the_measured_step_is_one_of_all_tokens_and_all_rows(tmp_path):
    loaded = load(str(tiny_llama(tmp_path)), dtype=torch.float32, device=CPU)
    seen = []
    forward, logits = loaded.decoder.forward, loaded.decoder.logits
    loaded.decoder.forward = lambda ids, *rest: (seen.append(len(ids)), forward(ids, *rest))[1]
    loaded.decoder.logits = lambda hidden: (seen.append(len(hidden)), logits(hidden))[1]
    config = EngineConfig("m", block_size=8)
    build._run_full_step(config, loaded, CPU, slots=None, max_num_seqs=6, max_num_batched_tokens=60)
    assert seen == [60, 6, 60, 6]


@pytest.mark.parametrize("preallocate_kv", [False, True])
def test_the_pool_is_touched_while_loading_if_that_is_asked_for(tmp_path, preallocate_kv):
    config = EngineConfig(str(tiny_llama(tmp_path)), kv_cache_memory=256 * 2**20, preallocate_kv=preallocate_kv)
    before = psutil.Process().memory_info().rss
    engine = build.build_engine(config)
    touched = psutil.Process().memory_info().rss - before
    assert (touched > 250 * 2**20) == preallocate_kv, (touched, engine.info)


def test_preallocate_kv_is_yes_or_no():
    with pytest.raises(ConfigError, match="preallocate_kv must be True or False"):
        EngineConfig("model", preallocate_kv="yes")
