"""The engine against Transformers, in float32: the same greedy tokens for every family, and however they are computed.

An answer is held against one pass of Transformers' model over prompt and answer, on the CPU, where float32 is float32:
if the likeliest token at each place is the answer's next one, then greedy decoding gives this answer. Where the two
likeliest are closer than rounding, either is right.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import SamplingParams
from tests.engine.families import CASES, tokens
from tests.gpu.answers import NEW_TOKENS, Tokens, answers, check_by_model, engine, greedy, prompts, saved_model
from tests.gpu.cases import Case, Found, LeftOut, Setting
from tests.gpu.path_cases import path_cases

# The first are those whose heads the Triton kernels serve in every way that matters; they come first.
_FIRST = ("llama", "qwen3", "gemma2", "gpt-oss", "mixtral")
# Those of a family in all modes of a step: grouped heads, a window, biases.
_IN_ALL_MODES = ("qwen2", "gemma3")


def cases(setting: Setting) -> list[Case]:
    """The families, then the modes and what happens to sequences on the way, then what has kernels of its own."""
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
    found += path_cases(setting)
    return found + [Case(f"family: {name}", partial(_check_family, setting, name)) for name in order[len(_FIRST) :]]


def _modes() -> Iterator[tuple[str, dict[str, bool]]]:
    for eager in (True, False):
        for overlap in (False, True):
            label = f"graphs {'off' if eager else 'on'}, overlap {'on' if overlap else 'off'}"
            yield label, {"enforce_eager": eager, "async_scheduling": overlap}


def _check_family(setting: Setting, name: str) -> Found:
    model, folder = saved_model(setting, name)
    with engine(setting, folder, max_model_len=CASES[name].max_model_len) as llm:
        outputs = llm.generate(prompts(), greedy())
    return check_by_model(model, prompts(), answers(outputs))


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


def _sampled(setting: Setting, folder: Path, params: Sequence[SamplingParams], **options: Any) -> Tokens:
    with engine(setting, folder, **options) as llm:
        return answers(llm.generate([*prompts(), *prompts()], params))


def _check_mode(setting: Setting, name: str, switches: dict[str, bool]) -> Found:
    """Greedy rows are Transformers', and sampled ones those of the plain loop."""
    _require_card(setting)
    model, folder = saved_model(setting, name)
    params = _mixed_params(2 * len(prompts()))
    plain = {"enforce_eager": True, "async_scheduling": False}
    wanted = _sampled(setting, folder, params, **plain)
    got = _sampled(setting, folder, params, **switches)
    if got != wanted:
        different = [index for index, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other]
        raise AssertionError(f"requests {different} differ from the plain loop's")
    with engine(setting, folder, **switches) as llm:
        found = answers(llm.generate(prompts(), greedy()))
    return check_by_model(model, prompts(), found)


def _check_choices(setting: Setting, name: str) -> None:
    """Answers to one prompt share its blocks, differ, and are those of each answer's seed whatever else runs."""
    _, folder = saved_model(setting, name)
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
    with engine(setting, folder) as llm:
        together = answers(llm.generate(prompts(), params))
        alone = [answers(llm.generate([prompt], params))[0] for prompt in prompts()[:2]]
    if together[:2] != alone:
        raise AssertionError("four answers alone differ from those among others")
    if any(len(set(choices)) < 2 for choices in together):
        raise AssertionError("all answers to a prompt are the same")


def _check_preemption(setting: Setting, name: str, swap_space: int) -> Found:
    """In a pool that holds half of what the rows come to, they take turns, and say what they say with room for all."""
    model, folder = saved_model(setting, name)
    asked = [tokens(28, seed) for seed in range(6)]
    options = {"num_kv_blocks": 1 + 13, "max_model_len": 64, "enable_prefix_caching": False, "swap_space": swap_space}
    if CASES[name].max_model_len is not None:
        raise LeftOut("the model needs another length")
    with engine(setting, folder, **options) as llm:
        given = answers(llm.generate(asked, greedy()))
        stats = llm.stats()
    found = check_by_model(model, asked, given)
    if not stats.preemptions or bool(swap_space) != bool(stats.swaps):
        raise AssertionError(f"{stats.preemptions} preemptions, {stats.swaps} of them swapped: not what this is to try")
    return Found(f"{stats.preemptions} preemptions, {stats.swaps} swapped. {found.detail}".strip())
