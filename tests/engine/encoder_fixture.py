"""Tiny random-weight encoders in a folder, as Transformers saves them, and what Transformers computes with them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    CamembertConfig,
    DistilBertConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLMRobertaConfig,
)

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
_DISTILBERT_SIZES = {
    "vocab_size": 64,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
}

# By model type: the configuration, and its sizes.
ENCODERS: dict[str, tuple[type, dict[str, Any]]] = {
    "bert": (BertConfig, {**_SIZES, "max_position_embeddings": 64}),
    "roberta": (RobertaConfig, {**_SIZES, "type_vocab_size": 1}),
    "xlm-roberta": (XLMRobertaConfig, {**_SIZES, "type_vocab_size": 1}),
    "camembert": (CamembertConfig, {**_SIZES, "type_vocab_size": 1}),
    "distilbert": (DistilBertConfig, _DISTILBERT_SIZES),
    "mpnet": (MPNetConfig, _SIZES),
}
MAX_LENGTH = 64


def tiny_encoder(path: Path, family: str, *, tokenizer: bool = False, labels: int | None = None, **config: Any) -> Path:
    """Save a random encoder of two small layers under `path`, with a head if it has `labels`, and return `path`."""
    torch.manual_seed(0)
    make_config, sizes = ENCODERS[family]
    if labels is None:
        model = AutoModel.from_config(make_config(**{**sizes, **config}))
    else:
        model = AutoModelForSequenceClassification.from_config(make_config(**{**sizes, "num_labels": labels, **config}))
    # Transformers begins with biases of 0 and norms of 1, of which half could be missing without a trace.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    if tokenizer:
        letters_tokenizer(type_of_second=1 if family == "bert" else 0).save_pretrained(path)
    return path


def letters_tokenizer(*, type_of_second: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words of one letter, `[CLS] first [SEP] second [SEP]`, that lowers no case."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [chr(code) for code in (*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*names, *letters])}, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{type_of_second} [SEP]:{type_of_second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def sentence_transformers_files(
    folder: Path, *, pooling: dict[str, Any], modules: Sequence[str] = ("Transformer", "Pooling"), **settings: Any
) -> None:
    """Write the files that say how the encoder in `folder` is used; `settings` are those of sentence_bert_config."""
    pipeline = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(pipeline))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


@torch.inference_mode()
def reference_states(folder: Path, prompt: Sequence[int]) -> Tensor:
    """Return Transformers' final hidden states of one prompt, `[num_tokens, hidden_size]`."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states: Tensor = model(torch.tensor([list(prompt)])).last_hidden_state[0]
    return states


@torch.inference_mode()
def reference_logits(folder: Path, prompt: Sequence[int], token_types: Sequence[int] | None = None) -> Tensor:
    """Return the logits `[num_labels]` of Transformers' head for one prompt."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = {"input_ids": torch.tensor([list(prompt)])}
    if token_types is not None and AutoConfig.from_pretrained(folder).model_type == "bert":
        inputs["token_type_ids"] = torch.tensor([list(token_types)])
    logits: Tensor = model(**inputs).logits[0]
    return logits
