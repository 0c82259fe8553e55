"""A text's tokens, each in bytes, add up to the text's bytes, whatever alphabet the vocabulary is written in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from engine.sampling.token_bytes import TokenBytes
from tests.engine.models_fixture import byte_tokenizer
from tests.engine.test_detokenizer import METASPACE, SAMPLES

BYTES = byte_tokenizer()


def joined(tokenizer, text):
    token_bytes = TokenBytes(tokenizer)
    return b"".join(map(token_bytes.of, tokenizer.encode(text, add_special_tokens=False)))


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_byte_level_tokens_add_up_to_any_text(text):
    assert joined(BYTES, text) == text.encode()


@pytest.mark.parametrize("text", SAMPLES)
def test_pieces_with_spaces_and_bytes_add_up_to_the_text(text):
    # This tokenizer writes a space before every text, and its decoder takes it off.
    assert joined(METASPACE, text).removeprefix(b" ") == text.removeprefix(" ").encode()


@pytest.mark.model
@pytest.mark.parametrize("text", SAMPLES)
def test_a_real_vocabularys_tokens_add_up_to_the_text(smollm2_tokenizer, text):
    assert joined(smollm2_tokenizer, text) == text.encode()


def test_special_tokens_have_their_names_bytes():
    assert TokenBytes(BYTES).of(BYTES.convert_tokens_to_ids("<|im_start|>")) == b"<|im_start|>"


def test_an_id_beyond_the_tokenizer_has_no_bytes():
    assert TokenBytes(BYTES).of(319) == b""


def test_a_tokenizer_that_is_written_in_python_has_the_bytes_of_its_text():
    tokenizer = ByT5Tokenizer()
    assert joined(tokenizer, "plain") == b"plain"
    assert TokenBytes(tokenizer).of(tokenizer.eos_token_id) == b"</s>"


def test_other_kinds_of_tokens_have_the_bytes_of_their_text():
    core = Tokenizer(models.WordLevel({"hello": 0, "wörld": 1, "<unk>": 2}, unk_token="<unk>"))
    assert TokenBytes(PreTrainedTokenizerFast(tokenizer_object=core)).of(1) == "wörld".encode()
    core.decoder = decoders.WordPiece()
    assert TokenBytes(PreTrainedTokenizerFast(tokenizer_object=core)).of(0) == b"hello"
