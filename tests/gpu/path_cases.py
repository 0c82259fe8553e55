"""What an engine does by kernels of its own: adapters, experts, caches of 8 bits, and weights of 8 bits and of 4.

Each has what defines it: Transformers' model, with an adapter merged into it or not; or this engine with torch's
operations in the kernels' place, as `kernels.reference` and `kernels.reference_quantized` define them. On a CPU, whose
table has other kernels, Triton's take the place of those that a case is about, as far as the interpreter computes them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import LlamaConfig

from engine import build
from engine.models.moe import MixtureOfExperts
from kernels import reference, reference_quantized
from kernels.cache import AttentionBatch, KVCache, LayerKV
from kernels.linear import Linear, packers
from kernels.ops import kernels_for
from tests.engine import families
from tests.engine.kernel_tables import kernels_replaced
from tests.engine.lora_fixture import ATTENTION, merged, write_adapter
from tests.gpu.answers import NEW_TOKENS, answers, check_by_engine, check_by_model, engine, greedy, prompts, saved_model
from tests.gpu.cases import Case, Found, LeftOut, Setting
from tests.gpu.numbers import wants_float8

_MIXTURES = ("mixtral", "qwen3 moe", "gpt-oss")
# A model whose linears have inputs in whole groups.
_WHOLE_GROUPS = families.Case(
    LlamaConfig, {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 64}
)
# By how much the likeliest token's logit may be above that of the token that was chosen, of logits a few units wide.
# Sums of float16 are rounded at other places. What is quantised then goes to the neighbour now and then: float8's own
# definition differs by 0.4 between a step of one token and one of many.
_TIE_FLOAT16 = 0.05
_TIE_FLOAT8_CACHE = 0.1
_TIE_FLOAT8 = 1.0
_SCALING = 2.0


def _plan(
    batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None = None
) -> tuple[AttentionBatch, int | None]:
    return batch, window


def _attend(
    query: Tensor,
    layer: LayerKV,
    plan: tuple[AttentionBatch, int | None],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    batch, window = plan
    return reference.paged_attention(query, layer, batch, scale, window, softcap, sinks)


def _by_definition(multiply: Any, weight: Any, bias: Tensor | None) -> Linear:
    return lambda x: multiply(x, weight, bias)


CACHE_BY_DEFINITION = {
    "write_kv": reference.write_kv,
    "write_qkv": reference.write_qkv,
    "plan_attention": _plan,
    "paged_attention": _attend,
    "graph_plans": None,
}
WEIGHTS_BY_DEFINITION = {
    "int4": packers(partial(_by_definition, reference_quantized.int4_linear)),
    "float8": packers(partial(_by_definition, reference_quantized.float8_linear)),
}


def path_cases(setting: Setting) -> list[Case]:
    """On a CPU without graphs."""
    ways = [True] if setting.interpreted else [True, False]
    found = [
        Case(f"adapters: two and none, graphs {_on(not eager)}", partial(_check_adapters, setting, eager))
        for eager in ways
    ]
    found += [
        Case(f"experts: {name}, graphs {_on(not eager)}", partial(_check_experts, setting, name, eager))
        for name in _MIXTURES[: 1 if setting.interpreted else None]
        for eager in ways
    ]
    found.append(Case("cache: fp8", partial(_check_float8_cache, setting)))
    found += [
        Case(f"weights: {name}", partial(_check_quantised, setting, name, tie))
        for name, tie in (("int4", _TIE_FLOAT16), ("fp8", _TIE_FLOAT8))
    ]
    return found


def _on(switch: bool) -> str:
    return "on" if switch else "off"


@contextmanager
def _with_kernels(setting: Setting, *names: str) -> Iterator[None]:
    """Within it, engines have a GPU's entries of these names, on a CPU as well."""
    if not setting.interpreted:
        yield
        return
    # Importing it imports triton.
    from kernels.triton import cuda_kernels

    table = cuda_kernels(kernels_for(setting.device), (9, 0))
    with kernels_replaced(setting.device, **{name: getattr(table, name) for name in names}):
        yield


def _num_tokens(setting: Setting) -> int:
    return 4 if setting.interpreted else NEW_TOKENS


def _check_adapters(setting: Setting, eager: bool) -> Found:
    """Rows with one adapter, with another and with none in every step; three adapters share two slots."""
    length = _num_tokens(setting)
    model, folder = saved_model(setting, "llama")
    paths = [setting.folder / f"adapter-{seed}" for seed in range(3)]
    kinds: list[dict[str, Any]] = [{}, {"linears": ATTENTION, "r": 16, "lora_alpha": 32}, {"r": 2, "lora_alpha": 4}]
    for seed, (path, kind) in enumerate(zip(paths, kinds, strict=True)):
        if not path.exists():
            write_adapter(path, folder, seed=seed, **kind)
    loras = [None, *map(str, paths)]
    asked = [prompt for prompt in prompts()[:2] for _ in loras]
    options = {"max_loras": 2, "max_lora_rank": 16, "enforce_eager": eager}
    with _with_kernels(setting, "lora"), require_graphs(eager), engine(setting, folder, **options) as llm:
        given = answers(llm.generate(asked, greedy(length), lora=loras * 2))
    for place, path in enumerate([None, *paths]):
        adapted = model if path is None else merged(folder, path, _SCALING)
        check_by_model(adapted, asked[place :: len(loras)], given[place :: len(loras)], length)
    if len({answer for (answer,) in given[: len(loras)]}) != len(loras):
        raise AssertionError("two adapters say the same")
    return Found()


def _check_experts(setting: Setting, name: str, eager: bool) -> Found:
    length = _num_tokens(setting)
    model, folder = saved_model(setting, name)
    asked = prompts()[1:3] if setting.interpreted else prompts()
    entries = ("stack_experts", "mixture_of_experts")
    with _with_kernels(setting, *entries), require_graphs(eager), engine(setting, folder, enforce_eager=eager) as llm:
        decoder = llm._core._loop._runner._model
        mixtures = [part for part in map(_feed_forward, decoder._weights.layers) if isinstance(part, MixtureOfExperts)]
        if not mixtures or not all(mixture.capturable for mixture in mixtures):
            raise AssertionError("the experts are not stacked")
        given = answers(llm.generate(asked, greedy(length)))
    return check_by_model(model, asked, given, length)


def _check_float8_cache(setting: Setting) -> Found:
    wants_float8(setting)
    _, folder = saved_model(setting, "qwen2")
    options = {"kv_cache_dtype": "fp8"}
    with engine(setting, folder, **options) as llm:
        given = answers(llm.generate(prompts(), greedy()))
    with kernels_replaced(setting.device, **CACHE_BY_DEFINITION), engine(setting, folder, **options) as llm:
        return check_by_engine(llm, prompts(), given, length=NEW_TOKENS, tie=_TIE_FLOAT8_CACHE)


def _check_quantised(setting: Setting, quantize: str, tie: float) -> Found:
    if setting.interpreted:
        raise LeftOut("a CPU has no such products")
    if quantize == "fp8":
        wants_float8(setting)
    _, folder = saved_model(setting, "whole groups", _WHOLE_GROUPS)
    options = {"quantize": quantize, "dtype": "float16"}
    with engine(setting, folder, **options) as llm:
        given = answers(llm.generate(prompts(), greedy()))
    with kernels_replaced(setting.device, **WEIGHTS_BY_DEFINITION), engine(setting, folder, **options) as llm:
        return check_by_engine(llm, prompts(), given, length=NEW_TOKENS, tie=tie)


@contextmanager
def require_graphs(eager: bool) -> Iterator[None]:
    """Raise `AssertionError` if an engine was built within it that is not `eager`, and captured no graph."""
    with patch.object(build, "DecodeGraphs", wraps=build.DecodeGraphs) as captured:
        yield
    if not eager and not captured.called:
        raise AssertionError("no graph was captured")


def _feed_forward(layer: Any) -> Any:
    return layer.feed_forward
