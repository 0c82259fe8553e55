"""GGUF files: a small one written here for what can go wrong, and SmolLM2's own against Transformers."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.errors import ModelNotSupported
from engine.loader import ModelFileInvalid, load
from engine.loader.locate import locate_model
from tests.engine.models_fixture import CHAT_TEMPLATE, PagedRun, byte_tokenizer, tiny_llama

CPU = torch.device("cpu")
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in OTHER_NAMES:
        return f"{OTHER_NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{BLOCK_NAMES[rest]}.{kind}"


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores query and key rows."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, folder: Path, *, kind=GGMLQuantizationType.F32, pre="gpt-2", without=(), extra=None, **numbers
) -> Path:
    """Write the tiny Llama of `folder` as llama.cpp's converter would; `numbers` overrides integer metadata."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    metadata = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
        **numbers,
    }
    for key, value in metadata.items():
        if key not in without:
            writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    write_tokenizer(writer, pre)
    for name, tensor in model.state_dict().items():
        if gguf_name(name) in without:
            continue
        values = tensor.numpy()
        for heads, projection in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if projection in name:
                values = neighbours(values, heads)
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, stored), raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    if pre == "sentencepiece":
        write_sentencepiece(writer)
        return
    vocab = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(vocab, key=vocab.get), "hi"])
    writer.add_token_types([1] * 256 + [3] * 4 + [1])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_sentencepiece(writer: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


@pytest.fixture
def folder(tmp_path):
    return tiny_llama(tmp_path / "folder")


def load_float32(path: Path):
    return load(str(path), dtype=torch.float32, device=CPU)


def logits(loaded) -> torch.Tensor:
    return PagedRun(loaded.decoder).step({"a": [5, 300, 17, 99, 4]})["a"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path, tied):
    folder = tiny_llama(tmp_path / "folder", tie_word_embeddings=tied)
    without = ("output.weight",) if tied else ()
    loaded = load_float32(write_gguf(tmp_path / "tiny.gguf", folder, without=without))
    assert loaded.config.tie_word_embeddings is tied
    torch.testing.assert_close(logits(loaded), logits(load_float32(folder)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [GGMLQuantizationType[name] for name in ("F16", "BF16", "Q8_0", "Q4_1")])
def test_quantised_tensors_give_the_model_of_their_rounded_values(tmp_path, folder, kind):
    loaded = load_float32(write_gguf(tmp_path / "tiny.gguf", folder, kind=kind))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data.copy_(torch.from_numpy(rounded))
    model.save_pretrained(tmp_path / "rounded")
    torch.testing.assert_close(logits(loaded), logits(load_float32(tmp_path / "rounded")), atol=1e-5, rtol=1e-5)


def test_without_a_dtype_a_gguf_file_gives_bfloat16(tmp_path, folder):
    loaded = load(str(write_gguf(tmp_path / "tiny.gguf", folder)), dtype=None, device=CPU)
    assert loaded.config.dtype == torch.bfloat16


def test_the_tokenizer_in_a_gguf_file_knows_its_special_tokens_and_template(tmp_path, folder):
    loaded = load_float32(write_gguf(tmp_path / "tiny.gguf", folder))
    assert loaded.tokenizer("hi<|im_end|>").input_ids == [256, 260, 259]
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.eos_token_ids == {257, 259}


def test_a_sentencepiece_tokenizer_is_read_with_its_byte_fallback(tmp_path, folder):
    loaded = load_float32(write_gguf(tmp_path / "tiny.gguf", folder, pre="sentencepiece"))
    ids = loaded.tokenizer("hi hié", add_special_tokens=False).input_ids
    assert loaded.tokenizer.convert_ids_to_tokens(ids) == ["▁hi", "▁hi", "<0xC3>", "<0xA9>"]
    assert loaded.tokenizer.decode(ids) == "hi hié"
    assert loaded.eos_token_ids == {2}


def test_frequency_factors_slow_the_rotation_as_llama3_does(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = tiny_llama(tmp_path / "folder", rope_parameters=rope)
    model = LlamaForCausalLM.from_pretrained(folder)
    plain = 1 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    expected = logits(load_float32(folder))
    without = load_float32(write_gguf(tmp_path / "without.gguf", folder))
    assert not torch.allclose(logits(without), expected, atol=1e-4)
    loaded = load_float32(write_gguf(tmp_path / "factors.gguf", folder, extra={"rope_freqs.weight": factors}))
    torch.testing.assert_close(logits(loaded), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [0, 10, 2000, -4096])
def test_a_truncated_gguf_file_is_invalid(tmp_path, folder, kept):
    path = write_gguf(tmp_path / "tiny.gguf", folder)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelFileInvalid, match=r"tiny\.gguf"):
        load_float32(path)


@pytest.mark.parametrize(
    ("without", "error", "named"),
    [
        ("blk.1.ffn_up.weight", ModelFileInvalid, r"blk\.1\.ffn_up\.weight"),
        ("llama.block_count", ModelFileInvalid, r"llama\.block_count"),
    ],
)
def test_what_a_gguf_file_lacks_is_named(tmp_path, folder, without, error, named):
    with pytest.raises(error, match=named):
        load_float32(write_gguf(tmp_path / "tiny.gguf", folder, without=(without,)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.dimension_count": 8}, "8 of 16"),
        ({"pre": "tekken"}, "tekken"),
    ],
)
def test_what_does_not_run_is_named(tmp_path, folder, changes, named):
    with pytest.raises(ModelNotSupported, match=named):
        load_float32(write_gguf(tmp_path / "tiny.gguf", folder, **changes))


def test_another_architecture_is_named_with_those_that_run(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelNotSupported, match=r"'mamba'.*llama"):
        load_float32(tmp_path / "mamba.gguf")


@pytest.fixture(scope="module")
def demo():
    return load("demo", dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def transformers_demo():
    path = locate_model("demo").path
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = LlamaForCausalLM(config)
    # AutoModelForCausalLM would want a package that nothing else here needs.
    model.load_state_dict(
        load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"], strict=False
    )
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def transformers_tokenizer():
    path = locate_model("demo").path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(12345))",
    "Ünïcödé, 漢字, emoji 🦊 and\ttabs\r\n  trailing  ",
    "<|im_start|>user\nWhat is 7 * 6?<|im_end|>\n<|im_start|>assistant\n",
    "",
    " ",
]


@pytest.mark.model
def test_smollm2_has_the_logits_of_transformers(demo, transformers_demo):
    ids = demo.tokenizer(TEXTS[0] + TEXTS[1]).input_ids
    with torch.inference_mode():
        expected = transformers_demo(torch.tensor([ids])).logits[0]
    run = PagedRun(demo.decoder)
    got = torch.cat([run.step({"a": ids[:20]})["a"], *(run.step({"a": [token]})["a"] for token in ids[20:])])
    torch.testing.assert_close(got, expected, atol=5e-4, rtol=1e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_tokens_are_those_of_transformers_and_come_back_as_the_text(demo, transformers_tokenizer, text):
    ids = demo.tokenizer(text).input_ids
    assert ids == transformers_tokenizer(text).input_ids
    assert demo.tokenizer.decode(ids) == text


@pytest.mark.model
def test_smollm2_digits_are_split_before_spaces_are_joined(demo):
    # What Transformers' reading of this file misses: SmolLM2 cuts digits off first, and then two spaces are one token.
    assert demo.tokenizer.convert_ids_to_tokens(demo.tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]


@pytest.mark.model
def test_smollm2_has_the_chat_template_of_transformers_and_ends_with_its_turn(demo, transformers_tokenizer):
    messages = [{"role": "user", "content": "Name a colour."}]
    ours, theirs = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for tokenizer in (demo.tokenizer, transformers_tokenizer)
    )
    assert ours == theirs
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(demo.tokenizer, name) == getattr(transformers_tokenizer, name)
    assert demo.eos_token_ids == {demo.tokenizer.convert_tokens_to_ids("<|im_end|>")}
