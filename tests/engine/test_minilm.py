"""The real all-MiniLM-L6-v2, from its sentence-transformers folder, against Transformers with the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from engine import LLM, PoolingParams
from engine.loader.locate import locate_model

pytestmark = pytest.mark.model

QUESTIONS = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
# What two ways to sum the same float32 products may differ by.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder():
    return locate_model("demo-embed").path


@pytest.fixture(scope="module")
def llm():
    return LLM("demo-embed", dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def texts():
    with QUESTIONS.open() as lines:
        questions = [json.loads(line)["question"] for _, line in zip(range(20), lines, strict=False)]
    return ["", "a", "Ünïcode, 漢字 and 🙂", "hello world", "hello world", " ".join(questions[:4]), *questions]


@pytest.fixture(scope="module")
def expected(folder, texts):
    """Each text alone, without padding: the mean of Transformers' hidden states, made one long."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        encoded = [tokenizer(text, truncation=True, max_length=256, return_tensors="pt") for text in texts]
        means = [model(**one).last_hidden_state[0].mean(0) for one in encoded]
    return torch.nn.functional.normalize(torch.stack(means)).numpy()


def vectors(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return np.stack([output.data for output in outputs])


def test_vectors_are_those_of_transformers(llm, texts, expected):
    embeddings = vectors(llm.embed(texts, PoolingParams(truncate_prompt_tokens=-1)))
    assert embeddings.shape == (len(texts), 384)
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose((embeddings * expected).sum(1), 1, rtol=0, atol=TOLERANCE)


def test_a_text_alone_gives_what_it_gives_among_others(llm, texts):
    params = PoolingParams(truncate_prompt_tokens=-1)
    alone = np.concatenate([vectors(llm.embed([text], params)) for text in texts])
    np.testing.assert_allclose(vectors(llm.embed(texts, params)), alone, rtol=0, atol=TOLERANCE)


def test_its_files_limit_texts_to_256_tokens_and_the_model_to_512(llm, folder):
    long = "word " * 300
    assert llm.info.max_model_len == 256
    (refused,) = llm.embed([long])
    assert refused.error.code == "context_length_exceeded"
    (cut,) = llm.embed([long], PoolingParams(truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 256
    (whole,) = LLM(str(folder), dtype="float32", max_model_len=512, num_threads=1).embed([long])
    assert len(whole.prompt_token_ids) == 302


def test_what_means_the_same_scores_higher_than_what_does_not(llm):
    query = "How do I bake bread?"
    documents = ["Instructions for making a loaf at home.", "The stock market fell on Tuesday."]
    bread, market = llm.score(query, documents)
    assert bread.score > 0.4 > 0.2 > market.score
