"""A model of a few lines for tests of the loop: it reads the context back from the paged cache, as attention does.

Its KV cache holds each slot's token and position, and its next token is a function of all of them. So a wrong block
table, slot, position or prefix hit changes the answer, or raises.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from engine.adapter_slots import AdapterSlots
from engine.block_moves import SingleMoves
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.device import CpuDevice, Device
from engine.errors import OutOfMemory
from engine.graphs import DecodeGraphs, graph_sizes
from engine.info import EngineInfo
from engine.inputs import HostInputs
from engine.loop import PlainLoop
from engine.plan import StepOutput, StepPlan
from engine.request import Request
from engine.runner import Runner, StepInFlight
from engine.sampling.params import SamplingParams
from engine.scheduler import Scheduler
from kernels.ops import AttentionBatch, KVCache, allocate_kv_cache
from kernels.reference import gumbel_noise
from tests.engine.late_device import row_runner

VOCAB_SIZE = 260
EOS = 257
# The logit of the toy's next token; all others are 0. At temperature 4 it is drawn about every third time.
CERTAINTY = 20


def next_token(context: Sequence[int]) -> int:
    """What the toy says after `context`: any byte, and now and then the end."""
    value = 17
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return EOS if value % 23 == 0 else value % 256


def answer(
    prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False, temperature: float = 0, seed: int = 0
) -> list[int]:
    """What the engine has to give for a request that is greedy, or one that samples with this seed."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        token = next_token(context)
        if temperature:
            scores = _noise(seed)[len(context)].clone()
            scores[token] += CERTAINTY / temperature
            token = int(scores.argmax())
        context.append(token)
        if token == EOS and not ignore_eos:
            break
    return context[len(prompt) :]


@lru_cache
def _noise(seed: int) -> Tensor:
    """The sampler's noise for the positions of any test, `[128, VOCAB_SIZE]`."""
    positions = torch.arange(128)
    return gumbel_noise(torch.full_like(positions, seed), positions, VOCAB_SIZE)


class ToyModel:
    """Writes `[token, position]` where a layer's key of two dimensions goes, and its hidden state is the next token.

    It reads tensors alone, as kernels do. Its plan for a graph is how many tokens each row has.
    """

    def reserve_plans(self, batch: AttentionBatch, kv: KVCache, max_context_len: int) -> list[Tensor]:
        return [torch.zeros_like(batch.seq_lens)]

    def refill_plans(self, plans: list[Tensor], batch: AttentionBatch, kv: KVCache) -> None:
        plans[0].zero_()[: len(batch.context_lens)] = torch.tensor(batch.context_lens)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: None = None,
        plans: list[Tensor] | None = None,
    ) -> Tensor:
        keys = kv.layer(0).key[:, 0]  # [num_blocks, block_size, 2]
        is_written = batch.slot_mapping >= 0
        written = torch.stack([token_ids, positions], dim=1).float()
        keys.view(-1, 2)[batch.slot_mapping[is_written]] = written[is_written]
        hidden = torch.full((len(token_ids), 1), math.nan)
        contexts = (plans[0] if plans else batch.seq_lens).tolist()
        starts = batch.query_start.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            context = contexts[row]
            stored = keys[batch.block_tables[row].long()].reshape(-1, 2)[:context]
            assert stored[:, 1].tolist() == list(range(context)), "the cache does not hold this row's positions"
            tokens = stored[:, 0].long().tolist()
            for place in range(start, end):
                hidden[place] = self.state(tokens[: context - end + place + 1])
        return hidden

    def state(self, context: list[int]) -> float:
        return next_token(context)

    def logits(self, hidden: Tensor) -> Tensor:
        certain = torch.nn.functional.one_hot(hidden[:, 0].nan_to_num().long(), VOCAB_SIZE).float() * CERTAINTY
        return certain.masked_fill_(hidden.isnan(), math.nan)


class FaultyRunner:
    """Runs steps, but for those that a test wants to fail: `fits` says of a plan whether memory holds it.

    Of a step that is launched ahead, `fits_sampling` says the same of the second half.
    """

    def __init__(self, runner: Runner, fits, fits_sampling=lambda plan: True) -> None:
        self._runner = runner
        self._fits = fits
        self._fits_sampling = fits_sampling

    def move_blocks(self, moves) -> None:
        self._runner.move_blocks(moves)

    def execute(self, plan: StepPlan) -> StepOutput:
        if not self._fits(plan):
            raise OutOfMemory("no memory left")
        return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> StepInFlight:
        if not self._fits(plan):
            raise OutOfMemory("no memory left")
        return self._runner.launch(plan)

    def sample(self, step: StepInFlight) -> None:
        if not self._fits_sampling(step.plan):
            raise OutOfMemory("no memory left")
        self._runner.sample(step)

    def collect(self, step: StepInFlight) -> StepOutput:
        return self._runner.collect(step)


def toy_limits(**options) -> SchedulerConfig:
    return SchedulerConfig(
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "block_size": 4,
            "num_kv_blocks": 65,
            **options,
        }
    )


def toy_runner(
    limits: SchedulerConfig,
    model=None,
    device: Device | None = None,
    *,
    rows: bool = False,
    graphs: bool = False,
    adapters: AdapterSlots | None = None,
    **entries,
) -> Runner:
    """A runner that has its inputs from the host or, with `rows` or `graphs`, from rows on its device.

    Then `entries` may name other kernels than the definitions.
    """
    model, device = model or ToyModel(), device or CpuDevice()
    kv, host = (
        allocate_kv_cache(1, num_blocks, limits.block_size, 1, 2, torch.float32, device.place)
        for num_blocks in (limits.num_kv_blocks, limits.num_host_blocks + 1)
    )
    if rows or graphs:
        captured = None
        if graphs:
            sizes = graph_sizes(limits.max_num_seqs)
            captured = DecodeGraphs(model, kv, device, adapters, sizes=sizes, max_model_len=limits.max_model_len)
        return row_runner(model, kv, device, limits, graphs=captured, adapters=adapters, **entries)
    mover, inputs = SingleMoves(kv, device, host), HostInputs(limits.block_size, device)
    return Runner(model, kv, device, mover, inputs, adapters, max_num_seqs=limits.max_num_seqs)


def run_step(scheduler: Scheduler, runner: Runner, token_budget: int | None = None) -> list[Request]:
    """Schedule, execute and commit one step, as the loop does, and return the requests that it finished."""
    plan = scheduler.schedule(token_budget)
    assert plan.rows, "there are requests, and nothing runs"
    runner.move_blocks(plan.moves)
    return scheduler.commit(plan, runner.execute(plan))


def toy_core(
    limits: SchedulerConfig | None = None, *, runner=None, tokenizer=None, seed: int = 0, adapters=None, pooling=None
) -> EngineCore:
    limits = limits or toy_limits()
    scheduler = Scheduler(limits, adapters)
    info = EngineInfo(
        model="toy",
        dtype="float32",
        device="cpu",
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=VOCAB_SIZE,
        num_kv_blocks=limits.num_kv_blocks,
        block_size=limits.block_size,
    )
    return EngineCore(
        scheduler,
        PlainLoop(scheduler, runner or toy_runner(limits), limits.max_num_batched_tokens),
        info,
        tokenizer=tokenizer,
        eos_token_ids=frozenset({EOS}),
        seed=seed,
        adapters=adapters,
        pooling=pooling,
    )


def request(
    index: int, prompt: Sequence[int], *, lora: str | None = None, priority: int = 0, group: str = "", **params
) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 8, **params})
    return Request(
        index,
        list(prompt),
        sampling,
        seed=index,
        eos_token_ids=frozenset({EOS}),
        lora=lora,
        priority=priority,
        group=group,
    )
