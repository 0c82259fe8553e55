"""What is read of a config.json: older and sparse ones, the limits that rotary embeddings set, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3Config

from engine.errors import ModelNotSupported
from engine.loader import load
from engine.loader.hf_config import read_hf_config
from engine.models.config import ModelConfig
from tests.engine.families import SMALL, longrope, randomise, rope, tokens
from tests.engine.models_fixture import PagedRun, tiny_llama

CPU = torch.device("cpu")


def write_config(folder: Path, **fields) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def read(folder: Path, max_model_len: int | None = None, **fields) -> ModelConfig:
    return read_hf_config(write_config(folder, **fields), max_model_len)[0]


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **SMALL, "hidden_size": 128}
GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}


def test_what_gemma3s_sparse_file_leaves_out_is_what_transformers_takes(tmp_path):
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(tmp_path, **GEMMA3, torch_dtype="bfloat16", text_config=text)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (131072, True)
    assert config.dtype == torch.bfloat16
    windows = [layer.window for layer in config.layers[:12]]
    assert windows == [1024] * 5 + [None] + [1024] * 5 + [None]
    sliding, full = config.layers[0].rope, config.layers[5].rope
    assert (sliding.kind, sliding.theta) == ("default", 1e4)
    assert (full.kind, full.theta, full.factor) == ("linear", 1e6, 8.0)


def test_longrope_as_phi3_wrote_it_before_transformers_5_is_read(tmp_path):
    scaling = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    older = {"rope_theta": 1e4, "rope_scaling": scaling, "original_max_position_embeddings": 64}
    assert read(tmp_path, **PHI3, **older).layers[0].rope.frequency_factors == (1.0,) * 16


def test_the_heads_without_rope_and_the_windows_of_smollm3_are_those_of_its_pattern(tmp_path):
    fields = {**SMALL, "num_hidden_layers": 8, "use_sliding_window": True, "sliding_window": 100}
    config = read(tmp_path, architectures=["SmolLM3ForCausalLM"], model_type="smollm3", **fields)
    assert [layer.rope is None for layer in config.layers] == [False, False, False, True] * 2
    assert [layer.window for layer in config.layers] == [None, None, None, 100] * 2


def test_a_window_as_wide_as_the_longest_sequence_is_none(tmp_path):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SMALL}
    assert {layer.window for layer in read(tmp_path, **mistral, sliding_window=511).layers} == {511}
    assert {layer.window for layer in read(tmp_path, **mistral, sliding_window=512).layers} == {None}


@pytest.mark.parametrize(
    ("max_model_len", "longest", "first_factor"),
    [(None, 64, "short"), (64, 64, "short"), (65, 512, "long"), (512, 512, "long")],
)
def test_longrope_is_chosen_for_the_longest_sequence_that_was_asked_for(tmp_path, max_model_len, longest, first_factor):
    config = read(tmp_path, max_model_len, **PHI3, **longrope(64))
    assert config.max_position_embeddings == longest
    expected = longrope(64)["rope_parameters"][f"{first_factor}_factor"]
    assert config.layers[0].rope.frequency_factors == tuple(expected)


def test_dynamic_scaling_stretches_the_context_only_where_it_was_asked_for(tmp_path):
    dynamic = rope("dynamic", factor=4.0)
    unscaled, within = (read(tmp_path, length, **LLAMA, **dynamic) for length in (None, 512))
    assert (unscaled.max_position_embeddings, unscaled.layers[0].rope.theta) == (512, 1e4)
    assert within == unscaled
    beyond = read(tmp_path, 513, **LLAMA, **dynamic)
    assert beyond.max_position_embeddings == 2048
    assert beyond.layers[0].rope.theta > 1e4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**LLAMA, "attn_logit_softcapping": 30.0}, r"attn_logit_softcapping \(30.0\)"),
        ({**LLAMA, "layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
        (
            {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": True},
            "attention_bias",
        ),
        (
            {
                **LLAMA,
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "chunked_attention",
        ),
        ({**LLAMA, "model_type": "no-such-model"}, "no-such-model"),
        (
            {
                **LLAMA,
                "model_type": "gemma2",
                "architectures": ["Gemma2ForCausalLM"],
                "use_bidirectional_attention": True,
            },
            "bidirectional",
        ),
        (
            {**PHI3, **longrope(64), "rope_parameters": {**longrope(64)["rope_parameters"], "short_mscale": 1.2}},
            "short_mscale",
        ),
    ],
)
def test_what_a_family_does_not_run_is_named_before_anything_is_loaded(tmp_path, fields, named):
    with pytest.raises(ModelNotSupported, match=named):
        read(tmp_path, **fields)


def test_tensors_that_no_switch_turns_on_are_refused_and_named(tmp_path):
    folder = tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | derived, folder / "model.safetensors")
    load(str(folder), dtype=None, device=CPU, model_impl="native")
    save_file(tensors | {"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ModelNotSupported, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(str(folder), dtype=None, device=CPU, model_impl="native")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_gemma3_that_sees_images_runs(tmp_path, prefix):
    small = {**SMALL, "head_dim": 32, "sliding_window": 24, "tie_word_embeddings": True}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=small, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = randomise(AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))
    write_config(tmp_path, **{**config.to_dict(), "architectures": ["Gemma3ForConditionalGeneration"]})
    tensors = {name.replace("model.language_model.", prefix): value for name, value in model.state_dict().items()}
    save_file(
        {name: value for name, value in tensors.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors"
    )
    ids = tokens(70)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    run = PagedRun(load(str(tmp_path), dtype=torch.float32, device=CPU, model_impl="native").decoder)
    torch.testing.assert_close(run.step({"a": ids})["a"], expected, atol=1e-4, rtol=1e-4)
