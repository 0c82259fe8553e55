"""The engine against Transformers, in float32: the same greedy tokens for every family, and however they are computed.

An answer is held against one pass of Transformers' model over prompt and answer, on the CPU, where float32 is float32:
if the likeliest token at each place is the answer's next one, then greedy decoding gives this answer. Where the two
likeliest are closer than rounding, either is right.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from engine import LLM, RequestOutput, SamplingParams
from tests.engine.families import CASES, SMALL, random_model, tokens
from tests.gpu.cases import Case, Found, LeftOut, Setting

# The first are those whose heads the Triton kernels serve in every way that matters; they come first.
_FIRST = ("llama", "qwen3", "gemma2", "gpt-oss", "mixtral")
# Those of a family in all modes of a step: grouped heads, a window, biases.
_IN_ALL_MODES = ("qwen2", "gemma3")
_TIE = 2e-4
_LENGTHS = (70, 5, 33, 1, 32)
_NEW_TOKENS = 24
_SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 200, "block_size": 16, "swap_space": 0}

Tokens = list[list[tuple[int, ...]]]
"""Of each request, each of its answers."""


def cases(setting: Setting) -> list[Case]:
    """The families, then the modes, then what happens to sequences on the way."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    order = sorted(CASES, key=lambda name: (name not in _FIRST, name.endswith("rope")))
    if setting.interpreted:
        order = ["llama"]
    found = [Case(f"family: {name}", partial(_check_family, setting, name)) for name in order[: len(_FIRST)]]
    for name in _IN_ALL_MODES[: 1 if setting.interpreted else None]:
        found += [Case(f"modes: {name}, {label}", partial(_check_mode, setting, name, on)) for label, on in _modes()]
        found.append(Case(f"several answers: {name}", partial(_check_choices, setting, name)))
        found.append(Case(f"preemption: {name}, recomputed", partial(_check_preemption, setting, name, 0)))
        found.append(Case(f"preemption: {name}, swapped", partial(_check_preemption, setting, name, 64 << 20)))
    return found + [Case(f"family: {name}", partial(_check_family, setting, name)) for name in order[len(_FIRST) :]]


def _modes() -> Iterator[tuple[str, dict[str, bool]]]:
    for eager in (True, False):
        for overlap in (False, True):
            label = f"graphs {'off' if eager else 'on'}, overlap {'on' if overlap else 'off'}"
            yield label, {"enforce_eager": eager, "async_scheduling": overlap}


def _model(setting: Setting, name: str) -> tuple[PreTrainedModel, str]:
    """A tiny random model of a family, and its folder, written when it is first asked for."""
    case = CASES[name]
    model = random_model(case.config(**{**SMALL, **case.fields})).float()
    folder = setting.folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    if not folder.exists():
        model.save_pretrained(folder)
    if case.max_model_len is not None:
        # Transformers derives dynamic frequencies from the longest sequence so far.
        with torch.inference_mode():
            model(torch.zeros(1, case.max_model_len, dtype=torch.int64))
    return model, str(folder)


@contextmanager
def _engine(setting: Setting, name: str, folder: str, **options: Any) -> Iterator[LLM]:
    """An engine that is gone, its memory too, when the block ends."""
    if setting.interpreted:
        options["num_threads"] = 1
    device = str(setting.device)
    given = {**_SIZES, "max_model_len": CASES[name].max_model_len, **options}
    llm = LLM(folder, dtype="float32", device=device, model_impl="native", **given)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def _prompts() -> list[list[int]]:
    return [tokens(length, seed) for seed, length in enumerate(_LENGTHS)]


def _answers(outputs: Sequence[RequestOutput]) -> Tokens:
    for output in outputs:
        if output.error is not None:
            raise AssertionError(f"request {output.index}: {output.error}")
    return [[tuple(answer.token_ids) for answer in output.outputs] for output in outputs]


def _check_greedy(model: PreTrainedModel, prompts: Sequence[list[int]], answers: Tokens) -> Found:
    ties = 0
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        if len(answer) != _NEW_TOKENS:
            raise AssertionError(f"{len(answer)} tokens, and {_NEW_TOKENS} were asked for")
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        short = logits.amax(-1) - chosen
        ties += int((short > 0).sum())
        if short.max() > _TIE:
            place = int((short > _TIE).nonzero()[0])
            raise AssertionError(
                f"prompt of {len(prompt)}, token {place}: {answer[place]} instead of {int(logits[place].argmax())}, "
                f"whose logit is higher by {float(short[place]):.3g}"
            )
    return Found(f"{ties} ties" if ties else "")


def _check_family(setting: Setting, name: str) -> Found:
    model, folder = _model(setting, name)
    prompts = _prompts()
    with _engine(setting, name, folder) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=_NEW_TOKENS, ignore_eos=True))
    return _check_greedy(model, prompts, _answers(outputs))


def _mixed_params(count: int) -> list[SamplingParams]:
    """Rows that sample in different ways, and end at different times."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "logprobs": 3},
        {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_p": 0.02},
    ]
    return [
        SamplingParams(**ways[index % len(ways)], seed=index, max_tokens=8 + 3 * index, ignore_eos=True)
        for index in range(count)
    ]


def _require_card(setting: Setting) -> None:
    if setting.device.type == "cpu":
        raise LeftOut("a CPU has neither graphs nor overlap")


def _sampled(setting: Setting, name: str, folder: str, params: Sequence[SamplingParams], **options: Any) -> Tokens:
    with _engine(setting, name, folder, **options) as llm:
        return _answers(llm.generate([*_prompts(), *_prompts()], params))


def _check_mode(setting: Setting, name: str, switches: dict[str, bool]) -> Found:
    """Greedy rows are Transformers', and sampled ones those of the plain loop."""
    _require_card(setting)
    model, folder = _model(setting, name)
    params = _mixed_params(2 * len(_LENGTHS))
    plain = {"enforce_eager": True, "async_scheduling": False}
    wanted = _sampled(setting, name, folder, params, **plain)
    got = _sampled(setting, name, folder, params, **switches)
    if got != wanted:
        different = [index for index, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other]
        raise AssertionError(f"requests {different} differ from the plain loop's")
    greedy = SamplingParams(temperature=0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    with _engine(setting, name, folder, **switches) as llm:
        answers = _answers(llm.generate(_prompts(), greedy))
    return _check_greedy(model, _prompts(), answers)


def _check_choices(setting: Setting, name: str) -> None:
    """Answers to one prompt share its blocks, differ, and are those of each answer's seed whatever else runs."""
    _, folder = _model(setting, name)
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=_NEW_TOKENS, ignore_eos=True)
    with _engine(setting, name, folder) as llm:
        together = _answers(llm.generate(_prompts(), params))
        alone = [_answers(llm.generate([prompt], params))[0] for prompt in _prompts()[:2]]
    if together[:2] != alone:
        raise AssertionError("four answers alone differ from those among others")
    if any(len(set(answers)) < 2 for answers in together):
        raise AssertionError("all answers to a prompt are the same")


def _check_preemption(setting: Setting, name: str, swap_space: int) -> Found:
    """In a pool that holds half of what the rows come to, they take turns, and say what they say with room for all."""
    model, folder = _model(setting, name)
    prompts = [tokens(28, seed) for seed in range(6)]
    greedy = SamplingParams(temperature=0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    options = {"num_kv_blocks": 1 + 13, "max_model_len": 64, "enable_prefix_caching": False, "swap_space": swap_space}
    if CASES[name].max_model_len is not None:
        raise LeftOut("the model needs another length")
    with _engine(setting, name, folder, **options) as llm:
        answers = _answers(llm.generate(prompts, greedy))
        stats = llm.stats()
    found = _check_greedy(model, prompts, answers)
    if not stats.preemptions or bool(swap_space) != bool(stats.swaps):
        raise AssertionError(f"{stats.preemptions} preemptions, {stats.swaps} of them swapped: not what this is to try")
    return Found(f"{stats.preemptions} preemptions, {stats.swaps} swapped. {found.detail}".strip())
