"""Transformers' `generate` on batches of rows of like length, padded on the left."""

from typing import Any

import torch
import transformers

_BATCH = 32
_PAD = 0


def load(model: str, threads: int, options: dict[str, Any]) -> Any:
    """Load a folder in bfloat16; `options` are further arguments of `generate`."""
    torch.set_num_threads(threads)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.generation_config.eos_token_id = None

    def answer(batch: list[dict[str, Any]]) -> list[list[int]]:
        longest = max(len(row["prompt"]) for row in batch)
        padding = [longest - len(row["prompt"]) for row in batch]
        prompts = [[_PAD] * pad + row["prompt"] for row, pad in zip(batch, padding, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        # A batch goes on until its last row has enough.
        most = max(row["new_tokens"] for row in batch)
        out = loaded.generate(
            torch.tensor(prompts),
            attention_mask=torch.tensor(mask),
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=_PAD,
            **options,
        )
        new = out[:, longest:].tolist()
        return [ids[: row["new_tokens"]] for ids, row in zip(new, batch, strict=True)]

    def generate(rows: list[dict[str, Any]]) -> list[list[int]]:
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]["prompt"]))
        answers: dict[int, list[int]] = {}
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            answers.update(zip(places, answer([rows[place] for place in places]), strict=True))
        return [answers[place] for place in range(len(rows))]

    return generate


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}
