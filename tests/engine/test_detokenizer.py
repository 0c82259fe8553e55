"""Incremental decoding against decoding at once, and stop strings wherever they fall."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import IncrementalDecoder, StopStringWatcher, decode
from tests.engine.models_fixture import byte_tokenizer

BYTES = byte_tokenizer()
SAMPLES = [
    "plain text, and some more of it to slide the window over more than sixteen tokens.",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 done",
    "漢字かな交じり文と한국어",
    "e\u0301 combining a\u0308\u0323 marks, \u200d joiners",
    "नमस्ते สวัสดี مرحبا",
    "\ufffd a real replacement character \ufffd",
    " leading and trailing \n\n",
]


def sentencepiece_like():
    """Words that carry their leading space, and bytes for everything else, as Llama 2's tokenizer has."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for piece in ("▁", "▁the", "▁hello", "lo", "hel", "▁wor", "ld", "a", "b", "c"):
        vocab[piece] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


METASPACE = sentencepiece_like()


def check_pieces(tokenizer, ids):
    incremental = IncrementalDecoder(tokenizer)
    text = "".join(incremental.push(token) for token in ids)
    whole = decode(tokenizer, ids)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}, "only incomplete bytes may be held back"
    assert whole.rstrip("\ufffd") == text.rstrip("\ufffd")


@pytest.mark.parametrize("text", SAMPLES)
def test_the_pieces_of_a_text_add_up_to_the_text(text):
    incremental = IncrementalDecoder(BYTES)
    pieces = [incremental.push(token) for token in BYTES(text)["input_ids"]]
    assert "".join(pieces) == text.rstrip("\ufffd")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 259), max_size=60))
def test_any_bytes_and_special_tokens_decode_as_at_once(ids):
    check_pieces(BYTES, ids)


@settings(max_examples=200, deadline=None)
@given(st.text("abcdehlortw é👍\u0301\n", max_size=40))
def test_word_pieces_with_spaces_and_byte_fallback_decode_as_at_once(text):
    check_pieces(METASPACE, METASPACE(text)["input_ids"])


@pytest.mark.model
@pytest.mark.parametrize("text", SAMPLES)
def test_smollm2_decodes_in_pieces_as_at_once(text, smollm2_tokenizer):
    ids = smollm2_tokenizer(text)["input_ids"]
    check_pieces(smollm2_tokenizer, ids)
    check_pieces(smollm2_tokenizer, ids[::-1])


def watch(text_or_ids, stops, *, include=False, free_until=0, tokenizer=BYTES):
    """Feed tokens until a stop string matches; returns it, the text, and the number of tokens used."""
    ids = tokenizer(text_or_ids)["input_ids"] if isinstance(text_or_ids, str) else text_or_ids
    watcher = StopStringWatcher(tokenizer, stops, include_stop=include)
    for used, token in enumerate(ids, start=1):
        if stop := watcher.push(token, may_stop=used > free_until):
            return stop, watcher.stopped_text, used
    return None, watcher.stopped_text, len(ids)


def test_a_stop_string_across_tokens_is_found_at_its_last_byte():
    assert watch("one END two", ["END"]) == ("END", "one ", 7)
    assert watch("one END two", ["END"], include=True) == ("END", "one END", 7)


def test_a_stop_string_inside_a_token_cuts_the_text_within_it():
    vocab = METASPACE.get_vocab()
    ids = [vocab["▁hello"], vocab["▁the"], vocab["▁wor"]]
    assert watch(ids, ["l"], tokenizer=METASPACE) == ("l", "he", 1)
    assert watch(ids, ["lo t"], tokenizer=METASPACE) == ("lo t", "hel", 2)


def test_a_stop_string_of_several_bytes_a_character():
    assert watch("ab👍cd", ["👍"]) == ("👍", "ab", 6)
    assert watch("ab👍cd", ["👎"]) == (None, None, 8)


def test_a_stop_string_before_an_unfinished_character_is_found_at_once():
    ids = [*BYTES("END")["input_ids"], BYTES("é")["input_ids"][0]]
    assert watch(ids, ["END"])[2] == 3


def test_the_stop_that_is_complete_first_wins_and_of_two_that_end_together_the_longer():
    assert watch("xabcx", ["abc", "b"])[:2] == ("b", "xa")
    assert watch("xabcx", ["c", "abc"])[:2] == ("abc", "x")


def test_a_stop_that_ends_within_the_first_tokens_is_passed_over():
    assert watch("stop and stop.", ["stop"], free_until=4)[:2] == ("stop", "stop and ")
    assert watch("stop and stop.", ["stop"], free_until=3)[:2] == ("stop", "")


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abé👍", max_size=30), stops=st.lists(st.text("abé👍", min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_the_cut_is_where_reading_character_by_character_would_stop(text, stops):
    expected = (None, None)
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(ending, key=len)
            expected = (longest, text[: end - len(longest)])
            break
    assert watch(text, stops)[:2] == expected
