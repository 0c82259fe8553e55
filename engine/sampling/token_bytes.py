"""What bytes a token stands for: a tokenizer's vocabulary is written in an alphabet of its own."""

import json
from functools import cache
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.detokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Byte-level BPE (GPT-2) writes each byte as one visible character; this is that alphabet, read backwards.
_BYTE_OF_CHARACTER: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}
# How the SentencePiece kind writes the bytes that no piece has, and a space.
_BYTE_PIECES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
_SPACE = "▁"


class TokenBytes:
    """The bytes of single tokens of one tokenizer, each worked out once.

    Tokens of a text one after the other give the text's bytes. What a decoder does beyond that is not a token's own:
    it takes a space off the beginning of the text, or leaves out special tokens; here these have their name's bytes.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self._decoders = _decoder_types(tokenizer)
        self.of = cache(self._bytes_of)

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes: none for an id that the model has but the tokenizer does not."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders and all(character in _BYTE_OF_CHARACTER for character in piece):
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        if "ByteFallback" in self._decoders and piece in _BYTE_PIECES:
            return _BYTE_PIECES[piece]
        if "Replace" in self._decoders or "Metaspace" in self._decoders:
            return piece.replace(_SPACE, " ").encode()
        return decode(self._tokenizer, [token_id], skip_special_tokens=False).encode()


def _decoder_types(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """The names of the steps by which a fast tokenizer makes text of tokens; none of one that is written in Python."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return set()
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return set()
    # The library shows a decoder's make-up only in the form in which it is pickled, which is JSON.
    state = json.loads(decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [state])}
