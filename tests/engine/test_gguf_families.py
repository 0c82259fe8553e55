"""GGUF files of each family, written as llama.cpp's converter writes them, against the models they were made from."""

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.errors import ModelNotSupported
from engine.loader import load
from tests.engine.families import SMALL, random_model, rope, tokens
from tests.engine.models_fixture import PagedRun, tiny_llama
from tests.engine.test_families import assert_close
from tests.engine.test_loader_gguf import write_gguf as write_llama

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A model of Transformers, and the metadata with which its file differs from a plain one."""

    architecture: str
    config: type[PreTrainedConfig]
    fields: dict
    metadata: dict


GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 24, "tie_word_embeddings": True}
GEMMA3 = {**GEMMA, "num_hidden_layers": 6}
KEY_LENGTH, WINDOW, THETA = "attention.key_length", "attention.sliding_window", "rope.freq_base"
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# What Transformers reads of such a file, and reads right.
PLAIN = {
    "qwen2": Case("qwen2", Qwen2Config, {}, {}),
    "qwen3": Case("qwen3", Qwen3Config, {"head_dim": 128}, {KEY_LENGTH: 128, "rope.dimension_count": 128}),
    "gemma2": Case("gemma2", Gemma2Config, GEMMA, {KEY_LENGTH: 256, WINDOW: 24, **CAPS}),
    "gemma3": Case("gemma3", Gemma3TextConfig, GEMMA3, {KEY_LENGTH: 256, WINDOW: 24, THETA: 1e6}),
    "phi3": Case("phi3", Phi3Config, {"hidden_size": 128}, {WINDOW: 0}),
}
# What it leaves out.
MORE = {
    "qwen3, small heads": Case("qwen3", Qwen3Config, {"head_dim": 64}, {KEY_LENGTH: 64}),
    "gemma2, other caps": Case(
        "gemma2",
        Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        {KEY_LENGTH: 256, WINDOW: 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3, scaled rope": Case(
        "gemma3",
        Gemma3TextConfig,
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {KEY_LENGTH: 256, WINDOW: 24, THETA: 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3, window and partial rotation": Case(
        "phi3",
        Phi3Config,
        {"hidden_size": 384, "partial_rotary_factor": 0.75, "sliding_window": 20},
        {WINDOW: 20, "rope.dimension_count": 72},
    ),
    "qwen2, linear rope": Case(
        "qwen2", Qwen2Config, rope("linear", factor=4.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ),
}
CASES = PLAIN | MORE


def write_gguf(path: Path, case: Case, model: PreTrainedModel, **tensors: np.ndarray) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_name("tiny")
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        **case.metadata,
    }
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        add[type(value)](f"{case.architecture}.{key}", value)
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # Gemma's norms multiply by one more than their weight, and files hold the sum.
        one_more = case.architecture.startswith("gemma") and name.endswith("norm.weight")
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), (tensor + one_more).numpy())
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_of(case: Case) -> PreTrainedModel:
    return random_model(case.config(**{**SMALL, **case.fields}))


def logits(path: Path, ids: list[int]) -> Tensor:
    decoder = load(str(path), dtype=torch.float32, device=CPU).decoder
    return PagedRun(decoder).step({"a": ids})["a"]


def reference_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_logits_of_the_model_it_was_made_from(tmp_path, name):
    model, ids = model_of(CASES[name]), tokens(70)
    assert_close(logits(write_gguf(tmp_path / "tiny.gguf", CASES[name], model), ids), reference_logits(model, ids))


@pytest.mark.parametrize("name", PLAIN)
def test_a_file_has_the_logits_that_transformers_reads_from_it(tmp_path, name):
    path, ids = write_gguf(tmp_path / "tiny.gguf", PLAIN[name], model_of(PLAIN[name])), tokens(70)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    config.pad_token_id = None  # Phi-3's own is beyond this vocabulary
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    assert_close(logits(path, ids), reference_logits(model, ids))


def test_norm_weights_of_gemma_keep_their_digits_in_bfloat16(tmp_path):
    case = PLAIN["gemma2"]
    model = model_of(case)
    model.save_pretrained(tmp_path / "folder")
    path = write_gguf(tmp_path / "tiny.gguf", case, model)
    folder, file = (load(str(model), dtype=torch.bfloat16, device=CPU).decoder for model in (tmp_path / "folder", path))
    ids = tokens(30)
    assert torch.equal(PagedRun(folder).step({"a": ids})["a"], PagedRun(file).step({"a": ids})["a"])


@pytest.mark.parametrize(
    ("name", "metadata", "named"),
    [
        ("gemma2", {KEY_LENGTH: 128}, "heads of 128 dimensions"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"attention.sliding_window_pattern": 4}, "pattern of windows"),
        ("qwen2", {WINDOW: 16}, "sliding_window"),
        ("qwen2", {"residual_scale": 0.5}, "residual_scale"),
        ("qwen3", {"rope.scaling.type": "yarn"}, "yarn"),
    ],
)
def test_what_a_family_does_not_run_is_named(tmp_path, name, metadata, named):
    case = PLAIN[name]._replace(metadata={**PLAIN[name].metadata, **metadata})
    with pytest.raises(ModelNotSupported, match=named):
        load(str(write_gguf(tmp_path / "tiny.gguf", case, model_of(case))), dtype=None, device=CPU)


def test_factors_that_depend_on_the_length_are_refused(tmp_path):
    case = PLAIN["phi3"]
    path = write_gguf(tmp_path / "tiny.gguf", case, model_of(case), rope_factors_long=np.ones(16, np.float32))
    with pytest.raises(ModelNotSupported, match="longrope"):
        load(str(path), dtype=None, device=CPU)


@pytest.mark.parametrize("text", ["It's 12345 o'clock", "a  b\r\n\n c\t!?", "e\u0301 ｶﾞ 漢字 🦊", "x\u00a0y  "])
def test_text_of_qwen2_is_split_and_composed_as_by_transformers(tmp_path, text):
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "folder"), pre="qwen2")
    ours, theirs = load(str(path), dtype=None, device=CPU).tokenizer.backend_tokenizer, Qwen2Tokenizer()._tokenizer
    composed = ours.normalizer.normalize_str(text)
    assert composed == theirs.normalizer.normalize_str(text)
    pieces = ours.pre_tokenizer.pre_tokenize_str(composed)
    assert len(pieces) > 2
    assert pieces == theirs.pre_tokenizer.pre_tokenize_str(composed)
