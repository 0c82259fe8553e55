"""Adapters in PEFT's format: what is read, and what is refused by its name."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapter_slots import AdapterSlots
from engine.device import CpuDevice
from engine.errors import RequestError
from engine.loader import load
from engine.loader.peft import PeftLoader, adapter_shapes, adapter_targets
from kernels.lora import LoraShape
from kernels.ops import kernels_for
from tests.engine.lora_fixture import edit, write_adapter
from tests.engine.models_fixture import tiny_llama

CPU = torch.device("cpu")
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def loader(base):
    config = load(str(base), dtype=torch.float32, device=CPU).decoder.config
    return PeftLoader(adapter_targets(config), tuple, max_rank=8, dtype=torch.float32)


@pytest.fixture
def adapter(base, tmp_path):
    return write_adapter(tmp_path / "adapter", base, seed=0)


def refusal(loader, name):
    with pytest.raises(RequestError) as caught:
        loader.load(str(name))
    assert caught.value.field == "lora"
    return caught.value.code, str(caught.value)


def change_tensors(adapter, change):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_the_tensors_and_not_target_modules_say_what_is_adapted(loader, adapter):
    edit(adapter, target_modules=["q_proj"])
    assert {projection for _, projection in loader.load(str(adapter)).factors} == {
        "qkv",
        "attention_out",
        "gate_up",
        "down",
    }


def test_the_revision_is_the_contents_and_not_the_place(loader, adapter, base, tmp_path):
    same = write_adapter(tmp_path / "same", base, seed=0)
    revision = loader.load(str(adapter)).revision
    assert loader.load(str(same)).revision == revision
    assert loader.load(str(edit(same, lora_alpha=9))).revision != revision
    assert loader.load(str(write_adapter(tmp_path / "other", base, seed=1))).revision != revision


def test_a_home_folder_is_expanded(loader, adapter, monkeypatch):
    monkeypatch.setenv("HOME", str(adapter.parent))
    assert loader.load("~/adapter").factors


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "VERA"},
        {"peft_type": None},
        {"use_dora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"layer_replication": [[0, 2]]},
        {"alora_invocation_tokens": [1, 2]},
        {"use_qalora": True},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"r": None},
        {"r": 0},
        {"r": 2.5},
        {"lora_alpha": "8"},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"q_proj": -1}},
        {"alpha_pattern": {"q_(proj": 4}},
    ],
    ids=str,
)
def test_a_configuration_that_is_not_plain_lora_is_refused_by_the_fields_name(loader, adapter, fields):
    code, message = refusal(loader, edit(adapter, **fields))
    assert code == "invalid_lora"
    (field,) = fields
    named = {"peft_type": "adapters of type", "r": "rank" if fields.get("r") == 2.5 else "r is"}
    assert named.get(field, field) in message


def rename(old, new):
    def change(tensors):
        for factor in ("A", "B"):
            tensors[f"{new}.lora_{factor}.weight"] = tensors.pop(f"{old}.lora_{factor}.weight")

    return change


def replace(name, tensor):
    def change(tensors):
        tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replace(f"{QUERY}.lora_magnitude_vector", torch.ones(64)), "DoRA"),
        (replace("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 320)), "embeddings"),
        (replace("base_model.model.lm_head.weight", torch.ones(4, 4)), "lm_head.weight"),
        (replace(f"{QUERY}.lora_B.bias", torch.ones(64)), "lora_B.bias"),
        (rename(QUERY, "base_model.model.lm_head"), "changes lm_head"),
        (rename(QUERY, QUERY.replace("layers.0", "layers.9")), "model.layers.9.self_attn.q_proj"),
        (lambda tensors: tensors.pop(f"{QUERY}.lora_B.weight"), "without its counterpart"),
        (lambda tensors: tensors.clear(), "no tensors"),
        (replace(f"{QUERY}.lora_A.weight", torch.ones(4, 63)), "(4, 63)"),
        (replace(f"{QUERY}.lora_B.weight", torch.ones(65, 4)), "(65, 4)"),
        (replace(f"{QUERY}.lora_A.weight", torch.ones(5, 64)), "(5, 64)"),
        (replace(f"{QUERY}.lora_A.weight", torch.ones(4, 64, dtype=torch.int8)), "int8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_their_name(loader, adapter, change, named):
    change_tensors(adapter, change)
    code, message = refusal(loader, adapter)
    assert code == "invalid_lora"
    assert named in message


def test_a_rank_above_the_limit_is_refused(loader, base, tmp_path):
    assert loader.load(str(write_adapter(tmp_path / "highest", base, seed=0, r=8))).factors
    code, message = refusal(loader, write_adapter(tmp_path / "above", base, seed=0, r=9))
    assert code == "invalid_lora"
    assert "max_lora_rank (8)" in message


def test_pickled_weights_are_never_loaded(loader, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    code, message = refusal(loader, adapter)
    assert code == "invalid_lora"
    assert "convert them to safetensors" in message


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_the_files_is_no_adapter(loader, adapter, missing):
    (adapter / missing).unlink()
    code, message = refusal(loader, adapter)
    assert code == "lora_not_found"
    assert missing in message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_config.json", b"\xff\xfe"),
        ("adapter_model.safetensors", b"\x00" * 7),
        ("adapter_model.safetensors", b"PK\x03\x04" * 20),
    ],
)
def test_a_corrupt_file_is_named(loader, adapter, file, content):
    (adapter / file).write_bytes(content)
    code, message = refusal(loader, adapter)
    assert code == "invalid_lora"
    assert file in message


def test_a_file_that_cannot_be_read_is_named(loader, adapter):
    (adapter / "adapter_config.json").unlink()
    (adapter / "adapter_config.json").mkdir()
    code, message = refusal(loader, adapter)
    assert code == "invalid_lora"
    assert "cannot be read" in message


@pytest.mark.parametrize("name", ["/nowhere/adapter", "./adapter", "~/adapter", "a/b/c"])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(loader, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("engine.loader.peft.snapshot_download", None)
    code, message = refusal(loader, name)
    assert code == "lora_not_found"
    assert name in message


def test_a_hub_id_is_fetched_at_its_revision(loader, adapter, monkeypatch):
    asked = []

    def download(repository, *, revision, allow_patterns):
        asked.append((repository, revision, allow_patterns))
        return str(adapter)

    monkeypatch.setattr("engine.loader.peft.snapshot_download", download)
    assert loader.load("someone/adapter").factors
    assert loader.load("someone/adapter@v2").factors
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert asked == [("someone/adapter", None, files), ("someone/adapter", "v2", files)]


def test_a_hub_id_that_cannot_be_fetched_is_not_found(loader, monkeypatch):
    def download(*_args, **_options):
        raise OSError("no network\nand more")

    monkeypatch.setattr("engine.loader.peft.snapshot_download", download)
    code, message = refusal(loader, "someone/adapter")
    assert code == "lora_not_found"
    assert "no network" in message


def test_the_memory_of_the_largest_adapter_is_known_beforehand(base, tmp_path):
    config = load(str(base), dtype=torch.float32, device=CPU).decoder.config
    slots = AdapterSlots(
        adapter_shapes(adapter_targets(config)),
        kernels_for(CPU).lora,
        CpuDevice(),
        num_slots=3,
        max_rank=8,
        dtype=torch.float32,
    )
    tensors = load_file(write_adapter(tmp_path, base, seed=0, r=8) / "adapter_model.safetensors")
    assert slots.bytes_to_come == 3 * sum(tensor.numel() * 4 for tensor in tensors.values())


def test_slices_of_a_projection_are_the_linears_of_the_checkpoint(base):
    shapes = adapter_shapes(adapter_targets(load(str(base), dtype=torch.float32, device=CPU).decoder.config))
    assert shapes[1, "qkv"] == LoraShape(64, (64, 32, 32))
    assert shapes[0, "gate_up"] == LoraShape(64, (96, 96))
    assert (shapes[0, "attention_out"], shapes[0, "down"]) == (LoraShape(64, (64,)), LoraShape(96, (64,)))
    assert len(shapes) == 8
