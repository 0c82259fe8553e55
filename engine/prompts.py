"""From what people write to what the model reads: text, chat messages or token ids in, token ids out.

A prompt that cannot be encoded becomes a `RequestError` value, not an exception: its neighbours go on.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from engine.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


class PromptEncoder:
    """Encodes prompts for one model. `tokenizer` may be None: then only token ids are served."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def encode(self, prompts: Iterable[Prompt]) -> list[list[int] | RequestError]:
        """Encodes a batch; each prompt's token ids, or its error, in the order given.

        Text gets the special tokens that the tokenizer adds by itself; messages go through the chat template, which
        writes its own. All text of the batch is tokenised in one call.
        """
        encoded: list[list[int] | RequestError] = []
        plain: list[tuple[int, str]] = []
        templated: list[tuple[int, str]] = []
        for place, prompt in enumerate(prompts):
            try:
                if isinstance(prompt, str):
                    plain.append((place, prompt))
                    encoded.append([])
                elif _is_messages(prompt):
                    templated.append((place, self._render(prompt)))
                    encoded.append([])
                else:
                    encoded.append(self._checked_ids(prompt))
            except RequestError as error:
                encoded.append(error)
        for texts, add_special_tokens in ((plain, True), (templated, False)):
            tokenised = self._tokenise([text for _, text in texts], add_special_tokens=add_special_tokens)
            for (place, _), ids in zip(texts, tokenised, strict=True):
                encoded[place] = ids
        return encoded

    def _checked_ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, Sequence):
            raise _invalid(
                f"A prompt is a string, a list of token ids or a list of messages, not {type(prompt).__name__}."
            )
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise _invalid(f"Token ids are integers, not {token_id!r}.")
        if error := unreadable(prompt, self._vocab_size):
            raise error
        return list(prompt)

    def _render(self, messages: Sequence[Message]) -> str:
        tokenizer = self._require_tokenizer()
        if tokenizer.chat_template is None:
            raise _invalid("The model has no chat template, so it takes text and token ids only.", field="messages")
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise _invalid(f"messages[{place}] must be an object with a `role`.", field="messages")
        # The template is a program that came with the model, and the messages are its input: whatever it raises
        # says that these messages do not suit it.
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise _invalid(f"The chat template refuses these messages: {error}", field="messages") from error
        return str(text)

    def _tokenise(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int] | RequestError]:
        if not texts:
            return []
        try:
            tokenizer = self._require_tokenizer()
        except RequestError as error:
            return [error for _ in texts]
        try:
            batch = tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]
        except (TypeError, UnicodeError):
            # Text with lone surrogates is no Unicode and fails the whole batch. Find the guilty.
            if len(texts) == 1:
                return [_invalid("The prompt is not valid Unicode text: it has a lone surrogate.")]
            return [ids for text in texts for ids in self._tokenise([text], add_special_tokens=add_special_tokens)]
        return [unreadable(ids, self._vocab_size) or self._without_double_bos(ids) for ids in batch]

    def _without_double_bos(self, ids: list[int]) -> list[int]:
        # Text that was rendered elsewhere often begins with the BOS that the tokenizer is about to add.
        bos = self._require_tokenizer().bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _require_tokenizer(self) -> "PreTrainedTokenizerBase":
        if self._tokenizer is None:
            raise _invalid("The model comes without a tokenizer, so it takes token ids only.")
        return self._tokenizer


def unreadable(token_ids: Sequence[int], vocab_size: int) -> RequestError | None:
    """Why a model cannot read a prompt, if it cannot: a tokenizer may have tokens that were added without the model."""
    if not token_ids:
        return _invalid("The prompt is empty.")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            return _invalid(f"Token id {token_id} is outside the model's vocabulary of {vocab_size}.")
    return None


def _is_messages(prompt: Any) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _invalid(message: str, *, field: str = "prompt") -> RequestError:
    return RequestError(message, field=field)
