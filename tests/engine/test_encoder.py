"""Encoders of the BERT family give Transformers' hidden states, and the engine around them their vectors and scores."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from engine import LLM, ConfigError, EngineConfig, ModelNotSupported, PoolingParams, TextPair
from engine.loader import ModelFileInvalid, load
from engine.models.encoder import EncoderBatch
from tests.engine.asking import AskingProcess
from tests.engine.encoder_fixture import (
    ENCODERS,
    MAX_LENGTH,
    reference_logits,
    reference_states,
    sentence_transformers_files,
    tiny_encoder,
)

CPU = torch.device("cpu")
# Ragged, out of order, some of equal length, one of a single token, one as long as the model takes.
PROMPTS = [
    [2, 9, 17, 5, 3],
    [7],
    [2, *(4 + n % 60 for n in range(MAX_LENGTH - 2)), 3],
    [2, 30, 3],
    [40, 41, 42, 43, 44],
    [11],
    [2, 3],
]
RAW = PoolingParams(normalize=False)


@pytest.fixture(scope="module", params=ENCODERS)
def folder(request, tmp_path_factory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("bert"), "bert", tokenizer=True)


@pytest.fixture(scope="module")
def bert_llm(bert) -> LLM:
    return LLM(str(bert), num_threads=1)


@pytest.fixture(scope="module", params=["bert", "xlm-roberta", "distilbert", "mpnet"])
def cross_encoder(request, tmp_path_factory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp(request.param), request.param, tokenizer=True, labels=1)


def pooled(states, pooling):
    return {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling].numpy()


def vectors(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return np.stack([output.data for output in outputs])


def errors(outputs):
    return [output.error and (output.error.code, output.error.field) for output in outputs]


def test_hidden_states_are_those_of_transformers(folder):
    encoder = load(str(folder), dtype=None, device=CPU).encoder
    prompts = sorted(PROMPTS, key=len)
    lengths = tuple(map(len, prompts))
    batch = EncoderBatch(
        token_ids=torch.tensor([token for prompt in prompts for token in prompt]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        token_types=torch.zeros(sum(lengths), dtype=torch.int64),
        lengths=lengths,
    )
    with torch.inference_mode():
        states = encoder.forward(batch).split(lengths)
    for prompt, state in zip(prompts, states, strict=True):
        torch.testing.assert_close(state, reference_states(folder, prompt), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_are_transformers_hidden_states_pooled(bert, bert_llm, pooling):
    outputs = bert_llm.embed(PROMPTS, PoolingParams(pooling=pooling, normalize=False))
    assert [output.prompt_token_ids for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
    expected = [pooled(reference_states(bert, prompt), pooling) for prompt in PROMPTS]
    np.testing.assert_allclose(vectors(outputs), expected, rtol=0, atol=2e-5)


def test_embeddings_come_normalised_unless_that_is_refused(bert_llm):
    raw, normalised = vectors(bert_llm.embed(PROMPTS, RAW)), vectors(bert_llm.embed(PROMPTS))
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert abs(lengths - 1).min() > 0.1
    np.testing.assert_allclose(normalised, raw / lengths, rtol=1e-6)
    assert normalised.dtype == np.float32


def test_a_prompt_alone_gives_what_it_gives_among_others(folder):
    llm = LLM(str(folder), num_threads=1)
    together = vectors(llm.embed(PROMPTS, RAW))
    alone = np.concatenate([vectors(llm.embed([prompt], RAW)) for prompt in PROMPTS])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    assert llm.stats().steps == 1 + len(PROMPTS), "the first time in one step"
    assert llm.stats().step_rows == 2 * len(PROMPTS)


def test_a_prompt_does_not_see_its_neighbours(bert_llm):
    one = vectors(bert_llm.embed([PROMPTS[0], [5] * 5, [6, 7]], RAW))
    other = vectors(bert_llm.embed([PROMPTS[0], [60] * 5, [8, 9]], RAW))
    np.testing.assert_array_equal(one[0], other[0])
    assert abs(one[1] - other[1]).max() > 1e-2


def test_small_budgets_give_the_same_vectors_in_more_steps(bert, bert_llm):
    small = LLM(str(bert), max_num_seqs=2, max_num_batched_tokens=MAX_LENGTH, num_threads=1)
    prompts = PROMPTS * 5
    np.testing.assert_allclose(vectors(small.embed(prompts, RAW)), vectors(bert_llm.embed(prompts, RAW)), atol=1e-5)
    assert small.stats().steps >= len(prompts) / 2
    assert small.stats().prompt_tokens == 5 * sum(map(len, PROMPTS))


def test_an_iterator_of_prompts_gives_an_iterator_of_vectors(bert_llm):
    outputs = bert_llm.embed(iter(PROMPTS), RAW)
    first = next(outputs)
    assert first.index == 0
    np.testing.assert_array_equal(first.data, bert_llm.embed(PROMPTS, RAW)[0].data)
    assert [output.index for output in outputs] == list(range(1, len(PROMPTS)))


def test_text_is_read_with_its_special_tokens_and_empty_text_is_only_those(bert_llm):
    text, empty = bert_llm.embed(["a b", ""])
    assert text.prompt_token_ids == (2, 4, 5, 3)
    assert empty.prompt_token_ids == (2, 3)
    np.testing.assert_array_equal(empty.data, bert_llm.embed([[2, 3]])[0].data)


def test_bad_rows_come_back_in_their_places_with_their_errors(bert_llm):
    prompts = ["a", [], [64], [5] * (MAX_LENGTH + 1), "a \ud800", TextPair("a", "b"), "a"]
    outputs = bert_llm.embed(prompts)
    invalid = ("invalid_request", "prompt")
    too_long = ("context_length_exceeded", "prompt")
    assert errors(outputs) == [None, invalid, invalid, too_long, invalid, invalid, None]
    assert len(outputs[3].prompt_token_ids) == MAX_LENGTH + 1
    assert outputs[1].data.shape == (0,)
    np.testing.assert_array_equal(outputs[0].data, outputs[6].data)


def test_truncation_keeps_the_special_tokens_of_text_and_the_first_of_ids(bert_llm):
    def ids(prompt, limit):
        (output,) = bert_llm.embed([prompt], PoolingParams(truncate_prompt_tokens=limit))
        return output.prompt_token_ids

    long = " ".join("abcdefgh" * 20)
    assert ids(long, 4) == (2, 4, 5, 3)
    assert len(ids(long, -1)) == MAX_LENGTH
    assert ids(long, -1)[-1] == 3
    assert ids([7, 8, 9, 10], 3) == (7, 8, 9)
    assert ids("a", 4) == (2, 4, 3)
    (no_room,) = bert_llm.embed([long], PoolingParams(truncate_prompt_tokens=2))
    assert errors([no_room]) == [("invalid_request", "truncate_prompt_tokens")]
    (still_too_long,) = bert_llm.embed([long], PoolingParams(truncate_prompt_tokens=100))
    assert errors([still_too_long]) == [("context_length_exceeded", "prompt")]


def test_each_prompt_may_have_parameters_of_its_own(bert_llm):
    params = [PoolingParams(pooling="cls"), PoolingParams(dimensions=5), PoolingParams(dimensions=33), PoolingParams()]
    cls, short, too_wide, default = bert_llm.embed([[2, 7, 3]] * 4, params)
    assert abs(cls.data - default.data).max() > 1e-2
    np.testing.assert_allclose(short.data, default.data[:5] / np.linalg.norm(default.data[:5]), rtol=1e-6)
    assert errors([too_wide]) == [("invalid_request", "dimensions")]


def test_an_encoder_refuses_to_generate_and_says_what_it_does(bert_llm):
    assert bert_llm.info.tasks == ("embed",)
    (output,) = bert_llm.generate(["a"])
    assert output.error.code == "unsupported_task"
    assert "embed" in output.error.hint
    (score,) = bert_llm.score("a", "b", PoolingParams(task="score"))
    assert (score.score, score.error.code) == (None, "unsupported_task")


def test_a_cross_encoder_scores_pairs_as_transformers_does(cross_encoder):
    llm = LLM(str(cross_encoder), num_threads=1)
    documents = ["c d e f", "c", "", "g h i j k l"]
    outputs = llm.score("a b", documents)
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    for document, output in zip(documents, outputs, strict=True):
        # In a list, since of an empty second text alone the tokenizer makes no pair.
        encoded = llm.tokenizer([("a b", document)])
        (ids,), (token_types,) = encoded["input_ids"], encoded["token_type_ids"]
        logits = reference_logits(cross_encoder, ids, token_types)
        assert output.score == pytest.approx(torch.sigmoid(logits).item(), abs=1e-5)
        assert output.num_prompt_tokens == len(ids)
    assert len({round(output.score, 4) for output in outputs}) == 4
    raw = llm.score("a b", documents, PoolingParams(task="score", use_activation=False))
    for output, plain in zip(outputs, raw, strict=True):
        assert 1 / (1 + np.exp(-plain.score)) == pytest.approx(output.score, abs=1e-6)
    assert llm.score(["a b"] * 4, documents) == outputs


def test_the_texts_of_a_pair_have_types_of_their_own(tmp_path):
    llm = LLM(str(tiny_encoder(tmp_path, "bert", tokenizer=True, labels=1)), num_threads=1)
    (pair,) = llm.score("a", "b")
    encoded = llm.tokenizer("a", "b")["input_ids"]
    assert pair.score != pytest.approx(torch.sigmoid(reference_logits(tmp_path, encoded)).item(), abs=1e-3)


def test_a_cross_encoder_refuses_to_embed_and_to_generate(cross_encoder):
    llm = LLM(str(cross_encoder), num_threads=1)
    assert llm.info.tasks == ("score",)
    (embedding,) = llm.embed(["a"])
    assert (embedding.error.code, embedding.error.hint.split()[1]) == ("unsupported_task", "score,")
    (answer,) = llm.generate(["a"])
    assert (answer.error.code, answer.error.hint.split()[1]) == ("unsupported_task", "score,")


def test_a_pair_that_is_too_long_is_cut_only_when_that_is_asked_for(tmp_path):
    llm = LLM(str(tiny_encoder(tmp_path, "bert", tokenizer=True, labels=1)), num_threads=1)
    long = " ".join("abcdefgh" * 10)
    (refused,) = llm.score("z y", long)
    assert refused.error.code == "context_length_exceeded"
    (cut,) = llm.score("z y", long, PoolingParams(task="score", truncate_prompt_tokens=-1))
    assert (cut.num_prompt_tokens, cut.error) == (MAX_LENGTH, None)
    whole_query = llm.tokenizer("z y", " ".join(long.split()[: MAX_LENGTH - 5]))
    logits = reference_logits(tmp_path, whole_query["input_ids"], whole_query["token_type_ids"])
    assert cut.score == pytest.approx(torch.sigmoid(logits).item(), abs=1e-5)


def test_pairs_are_refused_one_by_one(tmp_path):
    llm = LLM(str(tiny_encoder(tmp_path, "bert", tokenizer=True, labels=1)), num_threads=1)
    outputs = llm.score(["a", 3, "a", "a"], ["b", "b", None, "\ud800"])
    assert [output.error and output.error.field for output in outputs] == [None, "prompt", "prompt", "prompt"]
    (no_room,) = llm.score("a", "b", PoolingParams(task="score", truncate_prompt_tokens=3))
    assert no_room.error.field == "truncate_prompt_tokens"
    (just_room,) = llm.score("a", "b", PoolingParams(task="score", truncate_prompt_tokens=4))
    assert (just_room.num_prompt_tokens, just_room.error) == (4, None)


def test_a_head_of_several_labels_gives_logits_and_no_score(tmp_path):
    llm = LLM(str(tiny_encoder(tmp_path, "roberta", tokenizer=True, labels=3)), num_threads=1)
    (score,) = llm.score("a", "b")
    assert "3 labels" in score.error.message
    ids = [2, 4, 3, 5, 3]
    process = AskingProcess(EngineConfig(str(tmp_path), num_threads=1))
    process.start()
    output = process.ask(TextPair("a", "b"), PoolingParams(task="score")).result(60)
    process.stop()
    assert output.prompt_token_ids == tuple(ids)
    np.testing.assert_allclose(output.data, reference_logits(tmp_path, ids), atol=1e-5)


def test_a_pair_of_two_types_runs_on_a_model_that_has_one(tmp_path):
    tiny_encoder(tmp_path, "bert", tokenizer=True, labels=1, type_vocab_size=1)
    (output,) = LLM(str(tmp_path), num_threads=1).score("a", "b")
    assert output.score == pytest.approx(torch.sigmoid(reference_logits(tmp_path, [2, 4, 3, 5, 3])).item(), abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0.0"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_the_configuration_may_say_that_scores_are_logits(tmp_path, fields):
    path = tiny_encoder(tmp_path, "bert", tokenizer=True, labels=1) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    llm = LLM(str(tmp_path), num_threads=1)
    encoded = llm.tokenizer("a", "b")
    logits = reference_logits(tmp_path, encoded["input_ids"], encoded["token_type_ids"])
    (output,) = llm.score("a", "b")
    assert output.score == pytest.approx(logits.item(), abs=1e-5)


def test_a_model_without_a_head_scores_by_the_cosine_of_two_embeddings(bert_llm):
    queries, documents = ["a b", "c", "a b", "a" + " a" * MAX_LENGTH], ["a b", "d e f", "d e f", "c"]
    outputs = bert_llm.score(queries, documents)
    for query, document, output in zip(queries[:3], documents[:3], outputs[:3], strict=True):
        first, second = vectors(bert_llm.embed([query, document]))
        assert output.score == pytest.approx(float(first @ second), abs=1e-6)
    assert outputs[0].score == pytest.approx(1, abs=1e-6)
    assert (outputs[3].score, outputs[3].error.code) == (None, "context_length_exceeded")
    with pytest.raises(ValueError, match="2 queries, but 1 documents"):
        bert_llm.score(["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_sentence_transformers_files_decide_the_pooling(tmp_path, pooling, expected):
    tiny_encoder(tmp_path, "bert", tokenizer=True)
    sentence_transformers_files(tmp_path, pooling=pooling)
    (output,) = LLM(str(tmp_path), num_threads=1).embed([PROMPTS[0]])
    states = reference_states(tmp_path, PROMPTS[0])
    np.testing.assert_allclose(output.data, pooled(states, expected), atol=2e-5)


def test_sentence_transformers_files_decide_normalisation_length_and_case(tmp_path):
    tiny_encoder(tmp_path, "bert", tokenizer=True)
    sentence_transformers_files(
        tmp_path,
        pooling={"pooling_mode_mean_tokens": True},
        modules=["Transformer", "Pooling", "Normalize"],
        max_seq_length=6,
        do_lower_case=True,
    )
    llm = LLM(str(tmp_path), num_threads=1)
    assert llm.info.max_model_len == 6
    upper, lower, long = llm.embed(["A B", "a b", "a b c d e"], PoolingParams(truncate_prompt_tokens=-1))
    assert np.linalg.norm(upper.data) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(upper.data, lower.data)
    assert len(long.prompt_token_ids) == 6
    wider = LLM(str(tmp_path), num_threads=1, max_model_len=20)
    assert len(wider.embed(["a b c d e"])[0].prompt_token_ids) == 7


@pytest.mark.parametrize(
    ("pooling", "modules", "named"),
    [
        ({"pooling_mode_max_tokens": True}, ["Transformer", "Pooling"], "pooling_mode_max_tokens"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            ["Transformer", "Pooling"],
            "pooling_mode_cls_token and pooling_mode_mean_tokens",
        ),
        ({"pooling_mode_mean_tokens": True}, ["Transformer", "Pooling", "Dense"], "Dense"),
    ],
)
def test_a_pipeline_that_does_not_run_is_named(bert, tmp_path, pooling, modules, named):
    tiny_encoder(tmp_path, "bert")
    sentence_transformers_files(tmp_path, pooling=pooling, modules=modules)
    with pytest.raises(ModelNotSupported, match=named):
        LLM(str(tmp_path))


def test_a_length_that_is_none_is_named(tmp_path):
    tiny_encoder(tmp_path, "bert")
    sentence_transformers_files(tmp_path, pooling={"pooling_mode_mean_tokens": True}, max_seq_length="long")
    with pytest.raises(ModelFileInvalid, match="max_seq_length is 'long'"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "mish"}, "mish"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "decoder"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_what_does_not_run_is_named(tmp_path, fields, named):
    path = tiny_encoder(tmp_path, "bert") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ModelNotSupported, match=named):
        LLM(str(tmp_path))


def test_checkpoints_of_old_and_of_models_with_other_heads_load(bert, tmp_path):
    tiny_encoder(tmp_path, "bert")
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def old_name(name):
        for new, then in old.items():
            name = name.replace(new, then)
        return f"bert.{name}"

    save_file({old_name(name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(
        vectors(LLM(str(tmp_path), num_threads=1).embed(PROMPTS)), vectors(LLM(str(bert), num_threads=1).embed(PROMPTS))
    )


def test_a_checkpoint_without_its_head_is_refused(tmp_path):
    tiny_encoder(tmp_path, "bert", labels=1)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "classifier.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileInvalid, match=r"classifier\.weight"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 8},
        {"kv_cache_memory": 2**20},
        {"max_loras": 1},
        {"max_model_len": MAX_LENGTH + 1},
        {"max_model_len": 20, "max_num_batched_tokens": 10},
    ],
)
def test_options_that_say_nothing_to_an_encoder_are_refused(bert, options):
    with pytest.raises(ConfigError):
        LLM(str(bert), **options)


def test_a_small_token_budget_bounds_the_prompts(bert):
    llm = LLM(str(bert), max_num_batched_tokens=10, num_threads=1)
    assert llm.info.max_model_len == 10
    assert errors(llm.embed([[5] * 10, [5] * 11])) == [None, ("context_length_exceeded", "prompt")]


def test_bfloat16_is_close_to_float32(bert, bert_llm):
    half = vectors(LLM(str(bert), dtype="bfloat16", num_threads=1).embed(PROMPTS))
    assert half.dtype == np.float32
    cosines = (half * vectors(bert_llm.embed(PROMPTS))).sum(1)
    assert cosines.min() > 0.99


def test_the_files_of_a_pipeline_are_fetched_from_the_hub_with_the_model(bert, monkeypatch):
    files = ["config.json", "modules.json", "1_Pooling/config.json", "onnx/model.json", "original/model.safetensors"]
    fetched = []

    def download(name, *, allow_patterns, ignore_patterns, **_):
        fetched.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(bert)

    monkeypatch.setattr("engine.loader.locate.snapshot_download", download)
    load("someone/an-encoder", dtype=None, device=CPU)
    assert fetched == files[:3]
