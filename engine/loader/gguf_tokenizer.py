"""A Transformers tokenizer from a GGUF file's metadata."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_as_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split_as_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _split_as_gpt2()])


def _split_as_llama3() -> pre_tokenizers.PreTokenizer:
    return _split_by(_LLAMA3_SPLIT)


def _split_as_qwen2() -> pre_tokenizers.PreTokenizer:
    return _split_by(_QWEN2_SPLIT)


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# By tokenizer.ggml.pre: how text is cut before byte-pair merges. A wrong cut gives wrong tokens without a word.
_PRE_TOKENIZERS = {
    "gpt-2": _split_as_gpt2,
    "llama-bpe": _split_as_llama3,
    "llama3": _split_as_llama3,
    "qwen2": _split_as_qwen2,
    "smollm": _split_as_smollm,
}


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that `file` carries, with its chat template, or None if it carries none.

    Raises `ModelNotSupported` for a way of splitting text that is not known here.
    """
    model = file.metadata("tokenizer.ggml.model")
    if model is None or model == "none":
        return None
    if model == "llama":  # SentencePiece, whose merges have to be derived from scores: Transformers does that
        try:
            return AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, ImportError) as error:
            raise ModelFileInvalid(f"The tokenizer in {file.path} cannot be read ({error}).") from error
    if model != "gpt2":
        raise ModelNotSupported(f"{file.path}: tokenizers of type {model!r} do not run; gpt2 and llama do.")
    return _byte_level(file)


def _byte_level(file: GgufFile) -> PreTrainedTokenizerBase:
    pre = file.metadata("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ModelNotSupported(
            f"{file.path}: text split as {pre!r} is not known.", hint=f"Known are {', '.join(sorted(_PRE_TOKENIZERS))}."
        )
    tokens, merges = file.metadata("tokenizer.ggml.tokens"), file.metadata("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelFileInvalid(f"{file.path}: the tokenizer's tokens or merges are missing.")
    core = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=pre in ("llama-bpe", "llama3"),
        )
    )
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    core.decoder = decoders.ByteLevel()
    types = file.metadata("tokenizer.ggml.token_type") or []
    core.add_special_tokens([_added(token) for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL])
    core.add_tokens([_added(token) for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED])
    named = {name: _token(file, tokens, key) for name, key in _NAMED_TOKENS.items()}
    if file.metadata("tokenizer.ggml.add_bos_token") and (bos := named["bos_token"]) is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **named)
    tokenizer.chat_template = file.metadata("tokenizer.chat_template")
    return tokenizer


_NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def _token(file: GgufFile, tokens: list[str], key: str) -> str | None:
    index = file.metadata(key)
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)
