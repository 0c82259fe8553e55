"""From token ids back to text, and the watch for stop strings in it.

Text is decoded once, when a request ends, unless it has stop strings: only those need the text while it grows.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a decoder writes for bytes that are not (yet) a character.
_REPLACEMENT = "\ufffd"
# Tokens decoded together; the window slides when it has twice as many.
_WINDOW = 8


class IncrementalDecoder:
    """Decodes a growing list of token ids, a token at a time, in constant time per token.

    A token's text depends on its neighbours (a word's leading space, a character's other bytes), so each step decodes
    a window that begins some tokens back and returns what it has more than before. Bytes that do not complete a
    character are held back until they do. The pieces together are a prefix of what decoding all ids at once gives,
    which lacks nothing but the held bytes. (Where a model of the SentencePiece kind emits bytes that are no UTF-8, its
    decoder takes back valid characters just before them; those were returned here.)
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._window_start = 0
        self._next_window_start = 0
        self._shown = 0  # characters of the window's text that were returned

    def fork(self) -> "IncrementalDecoder":
        """A decoder that goes on from here by itself."""
        twin = copy(self)
        twin._ids = self._ids.copy()
        return twin

    def push(self, token_id: int) -> str:
        """Add a token and return the text that became certain."""
        self._ids.append(token_id)
        text = self._window_text()
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        # Slide only between two characters, so that the next window begins with a whole one.
        if new and certain == text and len(self._ids) - self._next_window_start >= _WINDOW:
            self._window_start, self._next_window_start = self._next_window_start, len(self._ids)
            self._shown = len(self._window_text())
        return new

    def _window_text(self) -> str:
        ids = self._ids[self._window_start :]
        return decode(self._tokenizer, ids, skip_special_tokens=self._skip_special_tokens)


class StopStringWatcher:
    """Finds the first stop string in a request's text, wherever the borders of tokens and characters fall.

    The first is the one that is complete first, reading character by character; of two that end together, the longer.
    So the answer does not depend on how the text is cut into tokens.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_strings: Sequence[str],
        *,
        include_stop: bool,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop_strings = stop_strings
        self._include_stop = include_stop
        self._text = ""
        self.stopped_text: str | None = None

    def fork(self) -> "StopStringWatcher":
        """A watcher that has seen the same text, and goes on by itself."""
        twin = copy(self)
        twin._decoder = self._decoder.fork()
        return twin

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token and return the stop string that it completes, if any; `stopped_text` then has the cut text."""
        searched = len(self._text)
        self._text += self._decoder.push(token_id)
        if not may_stop or len(self._text) == searched:
            return None
        matches = []
        for stop in self._stop_strings:
            start = self._text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        end, start, stop = min(matches)
        self.stopped_text = self._text[: end if self._include_stop else start]
        return stop


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
