"""What engine cases share: tiny random models, engines that end, and answers held against what defines them."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine import LLM, RequestOutput, SamplingParams
from tests.engine.families import CASES, SMALL, Case, random_model, tokens
from tests.gpu.cases import Found, Setting

NEW_TOKENS = 24
# Where the two likeliest tokens are closer than rounding, either is right.
TIE = 2e-4
_LENGTHS = (70, 5, 33, 1, 32)
_SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 200, "block_size": 16, "swap_space": 0}

Tokens = list[list[tuple[int, ...]]]
"""Of each request, each of its answers."""


def prompts() -> list[list[int]]:
    return [tokens(length, seed) for seed, length in enumerate(_LENGTHS)]


def greedy(num_tokens: int = NEW_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def saved_model(setting: Setting, name: str, case: Case | None = None) -> tuple[PreTrainedModel, Path]:
    """A tiny random model of a family, or of `case`, and its folder, written when it is first asked for."""
    case = case or CASES[name]
    model = random_model(case.config(**{**SMALL, **case.fields})).float()
    folder = setting.folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    if not folder.exists():
        model.save_pretrained(folder)
    if case.max_model_len is not None:
        # Transformers derives dynamic frequencies from the longest sequence so far.
        with torch.inference_mode():
            model(torch.zeros(1, case.max_model_len, dtype=torch.int64))
    return model, folder


@contextmanager
def engine(setting: Setting, folder: Path, **options: Any) -> Iterator[LLM]:
    """An engine that is gone, its memory too, when the block ends."""
    if setting.interpreted:
        options["num_threads"] = 1
    given = {**_SIZES, "dtype": "float32", "model_impl": "native", "device": str(setting.device), **options}
    llm = LLM(str(folder), **given)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def answers(outputs: Sequence[RequestOutput]) -> Tokens:
    for output in outputs:
        if output.error is not None:
            raise AssertionError(f"request {output.index}: {output.error}")
    return [[tuple(answer.token_ids) for answer in output.outputs] for output in outputs]


def check_by_model(
    model: PreTrainedModel, asked: Sequence[list[int]], given: Tokens, length: int = NEW_TOKENS
) -> Found:
    """One pass of Transformers' model over prompt and answer: the likeliest token at each place is the answer's."""
    ties = 0
    for prompt, (answer,) in zip(asked, given, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        ties += _count_ties(prompt, answer, logits.amax(-1) - chosen, length, TIE)
    return Found(f"{ties} ties" if ties else "")


def check_by_engine(llm: LLM, asked: Sequence[list[int]], given: Tokens, *, length: int, tie: float) -> Found:
    """The same by an engine that is right: what it says of prompt and answer as one prompt."""
    whole = [[*prompt, *answer] for prompt, (answer,) in zip(asked, given, strict=True)]
    outputs = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    ties = 0
    for prompt, (answer,), output in zip(asked, given, outputs, strict=True):
        if output.error is not None or output.prompt_logprobs is None:
            raise AssertionError(f"the definition: {output.error}")
        found = [one for one in output.prompt_logprobs[len(prompt) :] if one is not None]
        short = torch.tensor([one.top[0].logprob - one.logprob for one in found])
        ties += _count_ties(prompt, answer, short, length, tie)
    return Found(f"{ties} ties" if ties else "")


def _count_ties(prompt: list[int], answer: Sequence[int], short: torch.Tensor, length: int, tie: float) -> int:
    """`short` says by how much the likeliest token's logit is higher than the answer's."""
    if len(answer) != length or len(short) != length:
        raise AssertionError(f"{len(answer)} tokens, {len(short)} of them checked, and {length} were asked for")
    if short.max() > tie:
        place = int((short > tie).nonzero()[0])
        raise AssertionError(
            f"prompt of {len(prompt)}, token {place}: after {list(answer[:place])[-3:]} not {answer[place]}, another "
            f"logit is higher by {float(short[place]):.3g}"
        )
    return int((short > 0).sum())
