"""The sampler draws the same by the tables of a CPU, of the definitions and of Triton, for rows of all kinds."""

from random import Random

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.batch import SamplingBatch, sampling_batch
from engine.device import CpuDevice
from engine.plan import PlanRow, Sampled
from engine.request import Request
from engine.row_slots import RowSlots
from engine.sampling.penalties import PenaltyRows
from engine.sampling.prompt_logprobs import compute_prompt_logprobs, read_prompt_logprobs, wanted_tokens
from engine.sampling.sampler import read_draws, sample
from engine.sequence import Sequence
from engine.structured.grammar import GrammarMask
from kernels import ops
from kernels.ops import Kernels, kernels_for
from kernels.triton import cuda_kernels

CPU = CpuDevice()
VOCAB_SIZE = 300
NUM_BATCHES, NUM_STEPS = 12, 4
TABLES = {
    "definitions": lambda: ops._TORCH,
    "triton": lambda: cuda_kernels(ops._TORCH, (9, 0)),
}
READERS = ("engine.sampling.sampler", "engine.sampling.penalties", "engine.sampling.prompt_logprobs")


def use(monkeypatch: pytest.MonkeyPatch, table: Kernels) -> None:
    for reader in READERS:
        monkeypatch.setattr(f"{reader}.kernels_for", lambda device: table)


def draw_params(random: Random) -> SamplingParams:
    fields = {
        "repetition_penalty": [0.8, 1.3],
        "presence_penalty": [-1.0, 1.5],
        "frequency_penalty": [0.7],
        "logit_bias": [{5: 3.0, 6: -100.0}],
        "min_tokens": [6],
        "stop_token_ids": [[7, 8]],
        "logprobs": [0, 3, 20],
    }
    if random.random() < 0.1:
        fields["allowed_token_ids"] = [list(range(64, 230))]
    kind = random.choice(["greedy", "random", "limited", "beams"])
    if kind in ("random", "limited"):
        fields |= {"temperature": [0.3, 2.0]}
    if kind == "limited":
        fields |= {"top_k": [1, 9, 2 * VOCAB_SIZE], "top_p": [0.1, 0.8], "min_p": [0.05]}
    chosen = {name: random.choice(values) for name, values in fields.items() if random.random() < 0.6}
    chosen.setdefault("temperature", 1.0 if kind in ("random", "limited") else 0.0)
    if kind == "beams":
        chosen |= {"beam_width": 2, "temperature": 0.0}
        chosen.pop("logprobs", None)
    return SamplingParams(max_tokens=50, **chosen)


def draw_sequences(random: Random) -> list[Sequence]:
    requests = [
        Request(
            index,
            random.choices(range(VOCAB_SIZE), k=random.randint(1, 40)),
            draw_params(random),
            seed=random.getrandbits(60),
            eos_token_ids=frozenset({1}),
        )
        for index in range(random.randint(1, 7))
    ]
    return [sequence for request in requests for sequence in request.sequences]


def draw_mask(random: Random, num_rows: int) -> GrammarMask | None:
    rows = sorted(random.sample(range(num_rows), random.randint(0, num_rows)))
    words = np.random.RandomState(random.getrandbits(30)).randint(-(2**31), 2**31, (len(rows), VOCAB_SIZE // 32))
    return GrammarMask(*CPU.upload(np.array(rows), words.astype(np.int32))) if rows else None


def run_batches(dtype: torch.dtype) -> list[tuple[SamplingBatch, list[Sampled]]]:
    """What is drawn in some steps of some batches. Each step's tokens are those of a random answer, not those drawn."""
    drawn = []
    for seed in range(NUM_BATCHES):
        random = Random(seed)
        sequences = draw_sequences(random)
        penalty_rows = PenaltyRows(RowSlots(len(sequences)))
        for _ in range(NUM_STEPS):
            rows = [PlanRow(sequence, 0, 1, 1) for sequence in sequences]
            batch = sampling_batch(rows, CPU, penalty_rows)._replace(grammar=draw_mask(random, len(rows)))
            generator = torch.Generator().manual_seed(random.getrandbits(30))
            logits = (torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3).to(dtype)
            arrays = CPU.download(lambda: sample(logits, batch, CPU).tensors()).wait()  # noqa: B023
            drawn.append((batch, read_draws(batch, arrays)))
            for sequence in sequences:
                sequence.token_ids.append(random.choice([3, random.randrange(VOCAB_SIZE)]))
    return drawn


def check_entry(found, expected) -> None:
    assert (found is None) == (expected is None)
    if found is not None:
        assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
        assert [token for token, _ in found.top] == [token for token, _ in expected.top]
        assert [found.logprob, *(value for _, value in found.top)] == pytest.approx(
            [expected.logprob, *(value for _, value in expected.top)], abs=5e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", TABLES)
def test_rows_of_all_kinds_get_the_tokens_that_a_cpu_gives_them(monkeypatch, name, dtype):
    expected = run_batches(dtype)
    use(monkeypatch, TABLES[name]())
    found = run_batches(dtype)
    seen = set()
    for (batch, drawn), (_, wanted) in zip(found, expected, strict=True):
        for row, (one, other) in enumerate(zip(drawn, wanted, strict=True)):
            assert one.token_id == other.token_id
            check_entry(one.logprobs, other.logprobs)
            assert [token for token, _ in one.candidates] == [token for token, _ in other.candidates]
            assert [v for _, v in one.candidates] == pytest.approx([v for _, v in other.candidates], abs=5e-6)
            seen |= {"greedy" if batch.temperature[row] == 0 else "random"}
            seen |= {"top-k"} if 0 < batch.top_k[row] < VOCAB_SIZE and batch.temperature[row] else set()
            seen |= {"top-p"} if batch.top_p[row] < 1 and batch.temperature[row] else set()
            seen |= {"logprobs"} if one.logprobs else set()
            seen |= {"beams"} if one.candidates else set()
        seen |= {"grammar"} if batch.grammar else set()
        seen |= {"penalties"} if batch.edits and batch.edits.penalties else set()
    assert seen == {"greedy", "random", "top-k", "top-p", "logprobs", "beams", "grammar", "penalties"}


def test_log_probabilities_of_prompts_are_those_of_a_cpu(monkeypatch):
    params = SamplingParams(prompt_logprobs=4)
    (sequence,) = Request(0, [5, 9, 2, 250, 7], params, seed=0, eos_token_ids=frozenset()).sequences
    wanted = wanted_tokens([PlanRow(sequence, 0, 5, 1)])
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3

    def entries():
        tensors = compute_prompt_logprobs(logits, wanted, lambda states: states, CPU)
        return read_prompt_logprobs(wanted, [tensor.numpy() for tensor in tensors])[0]

    expected = entries()
    use(monkeypatch, cuda_kernels(ops._TORCH, (9, 0)))
    for found, other in zip(entries(), expected, strict=True):
        check_entry(found, other)
    assert len(expected) == 4


def test_the_tables_that_are_compared_are_different_ones():
    of_cpu, of_torch, of_triton = kernels_for(CPU.place), ops._TORCH, cuda_kernels(ops._TORCH, (9, 0))
    for name in ("draw", "apply_penalties", "token_logprobs", "likeliest", "largest"):
        assert len({getattr(table, name) for table in (of_cpu, of_torch, of_triton)}) == 3, name
