"""Families without a table: Transformers' own code with paged attention, against Transformers' own attention."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    JambaConfig,
    MambaConfig,
    Qwen3NextConfig,
    T5Config,
)

from engine import EngineConfig, SamplingParams
from engine.build import assemble_engine
from engine.errors import ModelNotSupported
from engine.loader import ModelFileInvalid, load
from engine.messages import NewRequest
from engine.models.decoder import Decoder
from engine.models.fallback import CannotPage, FallbackConfig, FallbackDecoder
from engine.models.fallback_check import check_against_eager
from engine.models.fallback_probe import probe_attention, window_of_mask
from tests.engine.models_fixture import PagedRun, tiny_llama

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
# By model type. Between them: windows, sinks, capped scores and logits, learned and no positions, heads whose values
# are narrower than their keys, rotated parts of heads, parallel layers, scaled logits, layer norms with a bias.
FAMILIES = {
    "starcoder2": {**GROUPED, "sliding_window": 24},
    "cohere2": {**GROUPED, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 20, "logit_scale": 0.25},
    "gpt_neox": SMALL,
    "phi": GROUPED,
    "olmo": {**GROUPED, "clip_qkv": 2.0},
    "glm4": {**GROUPED, "head_dim": 16},
    "exaone4": {**GROUPED, "num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4},
    "gpt2": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma2": {
        **GROUPED,
        "head_dim": 16,
        "sliding_window": 24,
        "attn_logit_softcapping": 5.0,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {**GROUPED, "head_dim": 16, "sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **SMALL,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "llama": GROUPED,
}


def make(model_type: str, path, **config):
    torch.manual_seed(1)
    fields = {**FAMILIES[model_type], "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, **config}
    return save(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)), path)


def save(model, path):
    """Save `model` with weights wide enough for clear choices, and return `path`."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 or (parameter.dim() == 1 and parameter.abs().sum() == 0):
                parameter.normal_(std=0.2)
    model.save_pretrained(path)
    return path


def load_fallback(folder, *, dtype=torch.float32, **options):
    return load(str(folder), dtype=dtype, device=CPU, model_impl="transformers", **options)


def edit_config(folder, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Family:
    """A tiny model of one family: loaded by the engine, and by Transformers with its own eager attention."""

    def __init__(self, folder) -> None:
        self.decoder = load_fallback(folder).decoder
        self.reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )

    def paged(self) -> PagedRun:
        return PagedRun(self.decoder)

    def expected(self, ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([ids])).logits[0]

    def generated(self, ids: list[int], count: int) -> list[int]:
        inputs = torch.tensor([ids])
        output = self.reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        return output[0, len(ids) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return Family(make(request.param, tmp_path_factory.mktemp(request.param)))


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_has_the_logits_of_transformers(family):
    ids = tokens(100)
    assert_close(family.paged().step({"a": ids})["a"], family.expected(ids))


def test_a_prompt_in_chunks_has_the_logits_of_transformers(family):
    ids = tokens(100)
    run = family.paged()
    logits = [run.step({"a": ids[start:end]})["a"] for start, end in ((0, 33), (33, 34), (34, 96), (96, 100))]
    assert_close(torch.cat(logits), family.expected(ids))


def test_sequences_that_share_steps_do_not_see_each_other(family):
    first, second, third = tokens(50, 1), tokens(17, 2), tokens(33, 3)
    run = family.paged()
    parts = [
        run.step({"first": first[:20], "second": second[:16]}),
        run.step({"third": third[:32], "second": second[16:], "first": first[20:49]}),
        run.step({"first": first[49:], "third": third[32:]}),
    ]
    for name, ids in (("first", first), ("second", second), ("third", third)):
        logits = torch.cat([part[name] for part in parts if name in part])
        assert_close(logits, family.expected(ids))


def test_32_greedy_tokens_are_those_of_generate(family):
    prompts = {"first": tokens(40, 1), "second": tokens(9, 2)}
    run = family.paged()
    answers = {name: [] for name in prompts}
    step = dict(prompts)
    for _ in range(32):
        for name, logits in run.step(step).items():
            last = logits[-1].clone()
            last[2] = -torch.inf  # as generate does for min_new_tokens
            answers[name].append(int(last.argmax()))
        step = {name: answer[-1:] for name, answer in answers.items()}
    for name, prompt in prompts.items():
        assert answers[name] == family.generated(prompt, 32)
        assert len(set(answers[name])) > 3


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("starcoder2", {24}),
        ("cohere2", {20, None}),
        ("exaone4", {16, None}),
        ("gpt_oss", {12, None}),
        ("phi", {None}),
    ],
)
def test_each_layer_has_the_window_that_it_asks_for(tmp_path, model_type, windows):
    decoder = load_fallback(make(model_type, tmp_path)).decoder
    assert {layer.window for layer in decoder._layers.values()} == windows


def test_a_window_as_wide_as_the_context_is_none(tmp_path):
    decoder = load_fallback(make("starcoder2", tmp_path, sliding_window=256)).decoder
    assert {layer.window for layer in decoder._layers.values()} == {None}


def test_the_kv_cache_has_room_for_the_wider_of_keys_and_values(tmp_path):
    config = load_fallback(make("deepseek_v3", tmp_path)).config
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 4, 24)


def test_an_engine_answers_as_generate_does(tmp_path):
    folder = make("cohere2", tmp_path)
    loaded = load_fallback(folder)
    core = assemble_engine(EngineConfig(str(folder), num_kv_blocks=64, block_size=16), loaded, CPU)
    assert (core.info.vocab_size, core.info.max_model_len, core.info.revision) == (320, 256, None)
    prompts = [tokens(40, 1), tokens(9, 2), tokens(25, 3)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, min_tokens=16)
    core.add_requests(NewRequest(index, tuple(prompt), params) for index, prompt in enumerate(prompts))
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
    family = Family(folder)
    for output in outputs:
        assert list(output.outputs[0].token_ids) == family.generated(prompts[output.index], 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(tmp_path, dtype):
    folder = make("phi", tmp_path)
    ids = tokens(60)
    logits = PagedRun(load_fallback(folder, dtype=dtype).decoder).step({"a": ids})["a"]
    assert logits.dtype == torch.float32
    expected = PagedRun(load_fallback(folder).decoder).step({"a": ids})["a"]
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_without_a_dtype_the_checkpoint_keeps_its_own(tmp_path):
    folder = make("phi", tmp_path)
    edit_config(folder, dtype="bfloat16")
    assert load_fallback(folder, dtype=None).config.dtype == torch.bfloat16
    edit_config(folder, dtype="float64")
    with pytest.raises(ModelNotSupported, match="float64"):
        load_fallback(folder, dtype=None)


def test_a_family_with_a_table_runs_natively_unless_transformers_is_asked_for(tmp_path):
    folder = str(tiny_llama(tmp_path))
    options = {"dtype": torch.float32, "device": CPU}
    assert isinstance(load(folder, **options).decoder, Decoder)
    assert isinstance(load(folder, **options, model_impl="native").decoder, Decoder)
    assert isinstance(load(folder, **options, model_impl="transformers").decoder, FallbackDecoder)


def test_a_family_without_a_table_runs_unless_native_is_asked_for(tmp_path):
    folder = str(make("gpt_neox", tmp_path))
    options = {"dtype": torch.float32, "device": CPU}
    assert isinstance(load(folder, **options).decoder, FallbackDecoder)
    with pytest.raises(ModelNotSupported, match="GPTNeoXForCausalLM"):
        load(folder, **options, model_impl="native")


def test_adapters_are_refused(tmp_path):
    decoder = load_fallback(make("gpt_neox", tmp_path)).decoder
    with pytest.raises(ModelNotSupported, match=r"GPTNeoXForCausalLM.*LoRA"):
        decoder.forward(torch.tensor([1]), torch.tensor([0]), None, None, adapters=object())


# Refused before a weight is read: the folders hold none.


def config_only(config, path, architecture: str):
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("config", "architecture", "reason"),
    [
        (MambaConfig(), "MambaForCausalLM", "recurrent state"),
        (JambaConfig(), "JambaForCausalLM", "recurrent state"),
        (Qwen3NextConfig(), "Qwen3NextForCausalLM", "recurrent state"),
        (T5Config(), "T5ForConditionalGeneration", "encoder and a decoder"),
        (AutoConfig.for_model("lfm2", full_attn_idxs=[1]), "Lfm2ForCausalLM", "layers of type conv"),
        (AutoConfig.for_model("llama4_text"), "Llama4ForCausalLM", "layers of type chunked_attention"),
        (AutoConfig.for_model("deepseek_v32"), "DeepseekV32ForCausalLM", "layers of type indexed_attention"),
        (AutoConfig.for_model("gemma3"), "Gemma3ForConditionalGeneration", "more than text"),
        (AutoConfig.for_model("qwen2_vl"), "Qwen2VLForConditionalGeneration", "no causal language model"),
        (AutoConfig.for_model("bloom"), "BloomForCausalLM", "attention interface"),
        (AutoConfig.for_model("stablelm"), "StableLmForCausalLM", "attention interface"),
        (BertConfig(), "BertForMaskedLM", "BertLMHeadModel"),
        (
            AutoConfig.for_model("phi", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "PhiForCausalLM",
            "dynamic.*longest sequence",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name_before_a_weight_is_read(tmp_path, config, architecture, reason):
    folder = config_only(config, tmp_path, architecture)
    with pytest.raises(ModelNotSupported, match=f"{architecture}.*{reason}"):
        load_fallback(folder, dtype=None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM.*recurrent state"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5.*encoder and a decoder"),
        ({"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}, "NobodysForCausalLM.*cannot read"),
        (
            {"architectures": ["GPTNeoXForCausalLM"], "quantization_config": {"quant_method": "awq"}},
            "GPTNeoXForCausalLM, which the engine does not run",
        ),
    ],
)
def test_without_being_asked_for_the_fallback_says_why_it_cannot_help(tmp_path, fields, reason):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", **fields}))
    with pytest.raises(ModelNotSupported, match=reason):
        load(str(tmp_path), dtype=None, device=CPU)


# Refused by what a token's pass through the model shows.


def test_a_model_that_drops_keyword_arguments_before_attention_is_refused(tmp_path):
    config = AutoConfig.for_model("nemotron", **GROUPED, head_dim=16)
    folder = save(AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(ModelNotSupported, match=r"NemotronForCausalLM.*keyword arguments"):
        load_fallback(folder)


def test_layers_that_differ_in_their_kv_heads_are_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **GROUPED))
    attention = model.model.layers[1].self_attn
    attention.num_key_value_groups = 4
    attention.k_proj = torch.nn.Linear(64, 16, bias=False)
    attention.v_proj = torch.nn.Linear(64, 16, bias=False)
    with pytest.raises(CannotPage, match=r"KV heads \(1, 2\)"):
        probe_attention(model, 256)


def test_an_attention_that_runs_twice_for_a_token_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **GROUPED))
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(CannotPage, match="more than once"):
        probe_attention(model, 256)


def test_a_layer_whose_mask_is_not_the_window_it_names_is_refused():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("starcoder2", **GROUPED, sliding_window=24))
    probe_attention(model, 256)
    for layer in model.model.layers:
        layer.self_attn.config = AutoConfig.for_model("starcoder2", **GROUPED, sliding_window=None)
        layer.self_attn.config._attn_implementation = "pagemill_probe"
    with pytest.raises(CannotPage, match="window of None and for a mask of 24"):
        probe_attention(model, 256)


def causal(_batch, _head, query, key):
    return key <= query


def windowed(_batch, _head, query, key):
    return (key <= query) & (key > query - 24)


def in_chunks(_batch, _head, query, key):
    return (key <= query) & (key // 24 == query // 24)


def everywhere(_batch, _head, query, key):
    return (key >= 0) & (query >= 0)


def with_a_prefix(_batch, _head, query, key):
    return (key < 4) | windowed(_batch, _head, query, key)


def test_a_mask_is_known_by_what_it_shows():
    assert window_of_mask(causal, 256) is None
    assert window_of_mask(windowed, 256) == 24
    assert window_of_mask(windowed, 30) == 24
    assert window_of_mask(windowed, 24) is None
    for mask in (in_chunks, everywhere, with_a_prefix):
        with pytest.raises(CannotPage, match="neither causal nor a sliding window"):
            window_of_mask(mask, 256)


# Refused by two short prompts.


def loaded_parts(tmp_path):
    folder = make("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    probed = probe_attention(model, 256)
    config = FallbackConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        max_position_embeddings=256,
        num_layers=2,
        num_heads=probed.num_heads,
        num_kv_heads=probed.num_kv_heads,
        head_dim=probed.head_dim,
        dtype=torch.float32,
    )
    return model, FallbackDecoder(model, config, probed.layers)


def test_a_model_that_pages_well_passes_the_check(tmp_path):
    check_against_eager(*loaded_parts(tmp_path))


def test_a_model_that_counts_positions_for_itself_is_found_out(tmp_path):
    model, decoder = loaded_parts(tmp_path)
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1]).unsqueeze(0))
    with pytest.raises(CannotPage, match="logits differ"):
        check_against_eager(model, decoder)


def test_a_model_that_mixes_neighbours_outside_of_attention_is_found_out(tmp_path):
    model, decoder = loaded_parts(tmp_path)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    with pytest.raises(CannotPage, match="logits differ"):
        check_against_eager(model, decoder)


def test_tensors_that_a_checkpoint_lacks_are_named_not_made_up(tmp_path):
    folder = make("gpt_neox", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("dense_4h_to_h.weight"))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ModelFileInvalid, match="dense_4h_to_h"):
        load_fallback(folder)
