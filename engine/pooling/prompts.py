"""From the prompts of requests that pool to token ids: cut to length where asked, and pairs of texts as well."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from engine.errors import RequestError
from engine.prompts import Prompt, PromptEncoder, unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a cross-encoder reads as one prompt."""

    first: str
    second: str


PoolingPrompt: TypeAlias = Prompt | TextPair


class EncodedPrompt(NamedTuple):
    """`token_types` say which text of a pair each token is from, 0 or 1; empty where that is all one."""

    token_ids: list[int]
    token_types: tuple[int, ...] = ()


class PoolingPromptEncoder:
    """Encodes prompts for one model. `lowercase` puts texts into lower case before they are tokenised."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int, *, lowercase: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lowercase = lowercase
        self._others = PromptEncoder(tokenizer, vocab_size)

    def encode(self, prompts: Iterable[tuple[PoolingPrompt, int | None]]) -> list[EncodedPrompt | RequestError]:
        """Encode a batch of prompts, each with the most tokens to keep of it; None keeps all.

        Text and pairs keep the special tokens that the tokenizer adds, and of a pair the longer text is cut first.
        Token ids and rendered messages are cut at their end.
        """
        encoded: dict[int, EncodedPrompt | RequestError] = {}
        texts: dict[int | None, list[tuple[int, str | TextPair]]] = {}
        others: list[tuple[int, Prompt, int | None]] = []
        for place, (prompt, limit) in enumerate(prompts):
            if not isinstance(prompt, str | TextPair):
                others.append((place, prompt, limit))
            elif error := self._refusal(prompt, limit):
                encoded[place] = error
            else:
                texts.setdefault(limit, []).append((place, prompt))
        for limit, group in texts.items():
            tokenised = self._tokenise([text for _, text in group], limit)
            encoded |= zip((place for place, _ in group), tokenised, strict=True)
        ids_of_others = self._others.encode(prompt for _, prompt, _ in others)
        for (place, _, limit), ids in zip(others, ids_of_others, strict=True):
            encoded[place] = ids if isinstance(ids, RequestError) else EncodedPrompt(ids[:limit])
        return [encoded[place] for place in range(len(encoded))]

    def _refusal(self, text: str | TextPair, limit: int | None) -> RequestError | None:
        if self._tokenizer is None:
            return _invalid("The model comes without a tokenizer, so it takes token ids only.")
        if isinstance(text, TextPair) and not all(isinstance(part, str) for part in (text.first, text.second)):
            return _invalid("Both texts of a pair must be strings.")
        special = self._tokenizer.num_special_tokens_to_add(pair=isinstance(text, TextPair))
        if limit is not None and limit <= special:
            return _invalid(
                f"{limit} tokens leave no room beside the model's {special} special tokens.",
                field="truncate_prompt_tokens",
            )
        return None

    def _tokenise(self, texts: Sequence[str | TextPair], limit: int | None) -> list[EncodedPrompt | RequestError]:
        tokenizer = self._tokenizer
        assert tokenizer is not None  # or all of them have been refused
        try:
            batch = tokenizer(
                [self._tokenizer_input(text) for text in texts],
                truncation=limit is not None,
                max_length=limit,
                return_attention_mask=False,
            )
        except (TypeError, UnicodeError):
            # Text with lone surrogates is no Unicode and fails the whole batch. Find the guilty.
            if len(texts) == 1:
                return [_invalid("The prompt is not valid Unicode text: it has a lone surrogate.")]
            return [encoded for text in texts for encoded in self._tokenise([text], limit)]
        # A tokenizer gives types where its model is meant to be told them.
        types = batch.get("token_type_ids") or [() for _ in texts]
        rows = zip(batch["input_ids"], types, strict=True)
        return [unreadable(ids, self._vocab_size) or EncodedPrompt(ids, tuple(row)) for ids, row in rows]

    def _tokenizer_input(self, text: str | TextPair) -> str | tuple[str, str]:
        if isinstance(text, TextPair):
            return (text.first.lower(), text.second.lower()) if self._lowercase else (text.first, text.second)
        return text.lower() if self._lowercase else text


def _invalid(message: str, *, field: str = "prompt") -> RequestError:
    return RequestError(message, field=field)
