"""Tokens a second of the engine on work that is the same everywhere, and what share of the machine's limit that is.

What is timed is generation alone: from the first prompt handed over to the last answer. Loading, what is compiled at
first use, the KV pool's memory, and a warm-up with other prompts come before.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.errors import ConfigError
from engine.loader import load_tokenizer
from engine.models.config import ModelConfig
from workers.bench_ceilings import GemmCeilings, measure_gemm
from workers.bench_flops import read_model_config, workload_flops
from workers.bench_peer import ReadyPeer, ready_peer
from workers.bench_workloads import Encode, TokenIds, Workload, build_workloads

_WARM_UP_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One workload's measurement.

    Attributes:
        seconds: Of generation.
        prompt_tokens, new_tokens: Of the rows as submitted; `cached_tokens` of the former came from the prefix cache.
        savable_tokens: How many prompt tokens an unlimited prefix cache with blocks of this size would save.
        flops: Operations of the workload with shared prefixes computed once; None where the shape is not known.
        ceilings: Measured just before.
        products: What the linears multiply, `bfloat16` or `int8`: which ceiling is the engine's.
        peer, peer_seconds: Another engine or another order, and its time for the same token ids; None without one.
    """

    name: str
    title: str
    rows: int
    seconds: float
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    savable_tokens: int
    flops: float | None
    ceilings: GemmCeilings
    products: str
    peer: str = ""
    peer_seconds: float | None = None

    @property
    def floor_seconds(self) -> float | None:
        """How long the workload's products alone take at the ceiling."""
        ceiling = self.ceilings.of(self.products)
        return self.flops / ceiling if self.flops is not None and ceiling else None

    @property
    def share(self) -> float | None:
        """Operations over wall time, as a share of the ceiling."""
        return None if self.floor_seconds is None else self.floor_seconds / self.seconds

    @property
    def saved_share(self) -> float | None:
        """Prompt tokens that the prefix cache saved, of those that an unlimited one would; None if there are none."""
        return self.cached_tokens / self.savable_tokens if self.savable_tokens else None

    @property
    def ratio(self) -> float | None:
        """How many times the peer's tokens a second."""
        return None if self.peer_seconds is None else self.peer_seconds / self.seconds

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("floor_seconds", "share", "saved_share", "ratio")}
        return {
            **asdict(self),
            **derived,
            "new_tokens_per_second": self.new_tokens / self.seconds,
            "prompt_tokens_per_second": self.prompt_tokens / self.seconds,
        }


def bench_engine(
    config: EngineConfig,
    options: dict[str, Any],
    names: Sequence[str],
    *,
    scale: float = 1.0,
    python: str | None = None,
    preload: str = "",
) -> Iterator[EngineRun]:
    """Measure the workloads of these names one after the other; `options` are those that `config` was made with.

    With `python`, an interpreter that has a peer, that one works on the same rows after the engine, but for W5; with
    the shared libraries of `preload`, with colons between.
    Raises `ConfigError` for a model without a tokenizer, and what loading the model raises.
    """
    options = {"preallocate_kv": True, **options}
    encode = encoder(config)
    workloads = build_workloads(encode, scale=scale)
    warm_ups = build_workloads(encode, scale=scale * _WARM_UP_SHARE, edition=1)
    model = read_model_config(config)
    with ExitStack() as stack:
        peer = stack.enter_context(ready_peer(python, config.model, preload)) if python else None
        llm: LLM | None = None
        for name in names:
            workload, warm_up = workloads[name], warm_ups[name]
            if workload.kv_tokens is None:
                llm = llm or LLM(config.model, **options)
                run = measure(llm, config, model, workload, warm_up)
                yield _beside(peer, run, workload, warm_up) if peer else run
                continue
            # Two engines at a time would be two models in memory.
            llm = None
            yield from _in_a_tight_pool(config, options, model, workload, warm_up)


def _beside(peer: ReadyPeer, run: EngineRun, workload: Workload, warm_up: Workload) -> EngineRun:
    seconds = peer.run(workload, warm_up, threads=torch.get_num_threads()).seconds
    return replace(run, peer=peer.name, peer_seconds=seconds)


def _in_a_tight_pool(
    config: EngineConfig, options: dict[str, Any], model: ModelConfig | None, workload: Workload, warm_up: Workload
) -> Iterator[EngineRun]:
    """By the policy of `config`, and beside that, if it is another, in the order of submission."""
    num_kv_blocks = 1 - -(workload.kv_tokens or 0) // config.block_size
    runs = []
    for policy in dict.fromkeys((config.scheduling_policy, "fcfs")):
        gc.collect()
        tight = {**options, "num_kv_blocks": num_kv_blocks, "scheduling_policy": policy}
        runs.append(measure(LLM(config.model, **tight), config, model, workload, warm_up))
    own, *others = runs
    for submitted in others:
        yield replace(own, peer="as submitted", peer_seconds=submitted.seconds)
        yield replace(submitted, title=f"{submitted.title}, as submitted")
    if not others:
        yield own


def encoder(config: EngineConfig) -> Encode:
    """Return what turns text into token ids for the model; raises `ConfigError` if it has no tokenizer."""
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    if tokenizer is None:
        raise ConfigError(
            f"{config.model} comes without a tokenizer, and the workloads are made from text.",
            hint="Put the tokenizer's files into the model's folder.",
        )

    def encode(text: str) -> TokenIds:
        # The whole corpus at once is longer than any model's context, of which the tokenizer would warn.
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def measure(
    llm: LLM, config: EngineConfig, model: ModelConfig | None, workload: Workload, warm_up: Workload
) -> EngineRun:
    """Warm up, measure the ceilings, and time `workload`."""
    generate(llm, warm_up)
    ceilings = measure_gemm(torch.device(llm.info.device))
    seconds, cached_tokens = generate(llm, workload)
    return EngineRun(
        name=workload.name,
        title=workload.title,
        rows=len(workload.rows),
        seconds=seconds,
        prompt_tokens=workload.prompt_tokens,
        new_tokens=workload.new_tokens,
        cached_tokens=cached_tokens,
        savable_tokens=savable_tokens(workload, config.block_size) if config.enable_prefix_caching else 0,
        flops=workload_flops(model, workload).total if model else None,
        ceilings=ceilings,
        products=llm.info.linear_dtype,
    )


def generate(llm: LLM, workload: Workload) -> tuple[float, int]:
    """Return the seconds of generation, and the prompt tokens that came from the prefix cache.

    Raises `RuntimeError` if an answer has not the length asked for: then nothing was measured.
    """
    params = [SamplingParams(temperature=0, max_tokens=row.new_tokens, ignore_eos=True) for row in workload.rows]
    began = time.perf_counter()
    outputs = llm.generate([row.prompt for row in workload.rows], params)
    seconds = time.perf_counter() - began
    for output, row in zip(outputs, workload.rows, strict=True):
        if output.error or len(output.outputs[0].token_ids) != row.new_tokens:
            raise RuntimeError(f"{workload.name}: row {output.index} has no {row.new_tokens} tokens: {output.error}")
    return seconds, sum(output.num_cached_tokens for output in outputs)


def savable_tokens(workload: Workload, block_size: int) -> int:
    """Count the prompt tokens that lie in full blocks which another row has computed, if none is ever forgotten."""
    seen: set[tuple[int, ...]] = set()
    saved = 0
    for row in workload.rows:
        # The last token is computed in any case: its logits are wanted.
        for end in range(block_size, len(row.prompt), block_size):
            block = tuple(row.prompt[:end])
            saved += block_size if block in seen else 0
            seen.add(block)
    return saved
