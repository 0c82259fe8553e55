"""The peers of the engine's benchmark do the work that they are timed for."""

import ctypes
import importlib.util
import sys
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import GGUFReader

from engine.errors import ConfigError
from tests.engine.models_fixture import tiny_llama
from tests.engine.test_loader_gguf import write_gguf
from workers.bench_peer import LLAMA, LLAMA_INT8, STATIC, ReadyPeer, prepare_model
from workers.bench_workloads import Row, Workload

VOCAB = 97


def next_token(history: list[int]) -> int:
    """What the model of `LlamaCpp` goes on with: any token before changes it, and so does their number."""
    return (sum(place * token for place, token in enumerate(history, start=1)) + len(history)) % VOCAB


class LlamaCpp:
    """llama.cpp's memory of sequences without a network; refuses a token that does not follow its sequence's last."""

    def __init__(self, *, batch_size: int) -> None:
        self.batch_size = batch_size
        self.sequences: defaultdict[int, list[int]] = defaultdict(list)
        self.batches: list[list[int]] = []  # the sequence of each token
        self.logits = np.zeros((0, VOCAB), np.float32)

    def decode(self, context: object, batch: SimpleNamespace) -> int:
        assert 0 < batch.n_tokens <= self.batch_size
        self.batches.append([batch.seq_id[index][0] for index in range(batch.n_tokens)])
        likeliest = []
        for index, sequence in enumerate(self.batches[-1]):
            history = self.sequences[sequence]
            if batch.pos[index] != len(history) or batch.n_seq_id[index] != 1:
                return -1
            history.append(batch.token[index])
            if batch.logits[index]:
                likeliest.append(next_token(history))
        self.logits = np.eye(VOCAB, dtype=np.float32)[likeliest]
        return 0

    def copy(self, memory: object, source: int, target: int, start: int, end: int) -> None:
        assert not self.sequences[target]
        self.sequences[target] = self.sequences[source][start:end]

    def remove(self, memory: object, sequence: int, start: int, end: int) -> None:
        assert (start, end) == (-1, -1)
        del self.sequences[sequence]

    def as_module(self) -> ModuleType:
        module = ModuleType("llama_cpp")
        module.__dict__.update(
            llama_backend_init=lambda: None,
            llama_model_default_params=lambda: None,
            llama_model_load_from_file=lambda path, params: path,
            llama_context_default_params=lambda: SimpleNamespace(n_batch=self.batch_size),
            llama_init_from_model=lambda model, params: params,
            llama_get_memory=lambda context: context,
            llama_model_get_vocab=lambda model: model,
            llama_vocab_n_tokens=lambda vocab: VOCAB,
            llama_batch_init=lambda size, embedding, sequences: SimpleNamespace(
                n_tokens=0,
                token=[0] * size,
                pos=[0] * size,
                n_seq_id=[0] * size,
                seq_id=[[0] for _ in range(size)],
                logits=[0] * size,
            ),
            llama_memory_clear=lambda memory, data: self.sequences.clear(),
            llama_memory_seq_cp=self.copy,
            llama_memory_seq_rm=self.remove,
            llama_decode=self.decode,
            llama_get_logits=lambda context: self.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        )
        return module


@pytest.fixture
def llama_cpp() -> LlamaCpp:
    return LlamaCpp(batch_size=16)


@pytest.fixture
def adapter(llama_cpp: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp.as_module())
    spec = importlib.util.spec_from_file_location("adapter", str(files("workers") / "bench_peers" / "llama_cpp.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(*prompts: list[int], new_tokens: int = 5) -> list[dict]:
    return [{"prompt": prompt, "new_tokens": new_tokens + index % 3} for index, prompt in enumerate(prompts)]


def answers(asked: list[dict]) -> list[list[int]]:
    found = []
    for row in asked:
        history = list(row["prompt"])
        for _ in range(row["new_tokens"]):
            history.append(next_token(history))
        found.append(history[len(row["prompt"]) :])
    return found


def test_llama_cpp_continues_every_row_whatever_shares_its_batch(llama_cpp: LlamaCpp, adapter: ModuleType) -> None:
    # Longer than a batch, one token, and more rows than slots.
    asked = rows(*([index + 1] * length for index, length in enumerate((40, 1, 16, 17, 3, 8, 2, 30))))
    assert adapter.load("model", 2, {"slots": 3})(asked) == answers(asked)
    assert len(set(map(len, llama_cpp.batches))) > 3
    assert all(batch == sorted(batch) for batch in llama_cpp.batches)
    assert not any(llama_cpp.sequences.values())


def test_llama_cpp_computes_a_prefix_of_all_rows_once(llama_cpp: LlamaCpp, adapter: ModuleType) -> None:
    prefix = list(range(50))
    asked = rows(*([*prefix, 60 + index, 7] for index in range(6)), new_tokens=1)
    assert adapter.load("model", 2, {"slots": 4})(asked) == answers(asked)
    # Each row's own two tokens, and those it generates but for the last.
    assert sum(map(len, llama_cpp.batches)) == 50 + sum(2 + row["new_tokens"] - 1 for row in asked)


def test_equal_prompts_keep_their_last_token_to_themselves(adapter: ModuleType) -> None:
    asked = rows(list(range(40)), list(range(40)))
    assert adapter.load("model", 2, {"slots": 4})(asked) == answers(asked)


def test_what_llama_cpp_refuses_is_not_timed(
    llama_cpp: LlamaCpp, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = adapter.load("model", 2, {"slots": 2})
    monkeypatch.setattr(sys.modules["llama_cpp"], "llama_decode", lambda context, batch: 1)
    with pytest.raises(RuntimeError, match="llama_decode returned 1"):
        generate(rows([1, 2]))


@pytest.mark.parametrize(("peer", "largest_error"), [(LLAMA, 2**-8), (LLAMA_INT8, 2**-7)])
def test_llama_cpp_reads_the_models_own_weights(tmp_path: Path, peer, largest_error: float) -> None:
    source = write_gguf(tmp_path / "model.gguf", tiny_llama(tmp_path / "model"), kind=gguf.GGMLQuantizationType.F32)
    made = GGUFReader(prepare_model(peer, sys.executable, str(source), tmp_path))
    given = GGUFReader(source)
    contents = [
        {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        for reader in (given, made)
    ]
    file_type = contents[1].pop("general.file_type")
    assert file_type == gguf.LlamaFileType[f"MOSTLY_{peer.weights}"]
    assert contents[0] == contents[1]
    matrices = 0
    for one, other in zip(given.tensors, made.tensors, strict=True):
        assert (one.name, list(one.shape)) == (other.name, list(other.shape))
        assert other.tensor_type.name == (peer.weights if len(one.shape) > 1 else "F32")
        before, after = (gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in (one, other))
        assert abs(before - after).max() <= largest_error * abs(before).max()
        matrices += len(one.shape) > 1
    assert matrices > 10


def test_a_folder_is_no_model_for_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama\.cpp reads GGUF files"):
        prepare_model(LLAMA, sys.executable, str(tiny_llama(tmp_path / "model")), tmp_path)


def test_a_peer_answers_in_a_process_of_its_own(tmp_path: Path) -> None:
    workload = Workload("", "", (Row([5, 6, 7], 4), Row([9], 2)))
    run = ReadyPeer(STATIC, sys.executable, tiny_llama(tmp_path / "model")).run(workload, workload, threads=1)
    assert [len(ids) for ids in run.token_ids] == [4, 2]
    assert list(run.versions) == ["transformers", "torch"]
    assert run.seconds > 0


def test_the_end_of_what_a_failed_peer_printed_is_shown(tmp_path: Path) -> None:
    workload = Workload("", "", (Row([5], 1),))
    with pytest.raises(ConfigError, match=r"(?s)main\.py .* failed in .*no-such-model"):
        ReadyPeer(STATIC, sys.executable, tmp_path / "no-such-model").run(workload, workload, threads=1)
