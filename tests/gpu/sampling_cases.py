"""The kernels of sampling against their definitions: draws, floors, masks, log-probabilities, penalties."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels import bitmask, reference, reference_sampling
from kernels.reference_sampling import IN_PROMPT, Limits, Penalties
from kernels.triton import floors, grammar, logprobs, penalties, sampling
from tests.gpu.cases import Setting, close, equal
from tests.gpu.numbers import Check, dtypes, randn, short


def sampling_cases(setting: Setting) -> Iterator[tuple[str, Check]]:
    """Names, and checks."""
    yield from _draws(setting)
    yield from _logprobs(setting)
    yield from _penalties(setting)


def _draws(setting: Setting) -> Iterator[tuple[str, Check]]:
    device = setting.device
    shapes = [(3, 127), (2, 8193)] if setting.interpreted else [(1, 3), (5, 8193), (66, 151_936), (7, 128_256)]

    def temperatures(rows: int) -> Tensor:
        return (torch.rand(rows) + 0.3).to(device)

    def check_largest(rows: int, size: int, dtype: torch.dtype) -> None:
        logits = randn(setting, rows, size, dtype=dtype, scale=3).round()
        for one, other in zip(sampling.largest(logits), reference.largest(logits), strict=True):
            equal(one, other)

    def check_draw(rows: int, size: int, dtype: torch.dtype) -> None:
        logits = randn(setting, rows, size, dtype=dtype, scale=3)
        logits[torch.rand(rows, size).to(device) < 0.5] = -torch.inf
        logits[:, size // 2] = 0
        heat = temperatures(rows)
        seeds, positions = torch.randint(-(2**62), 2**62, (2, rows)).to(device)
        drawn = sampling.gumbel_argmax(logits, heat, seeds, positions)
        wide = logits.float()
        scores = (wide - wide.amax(-1, keepdim=True)) / heat.unsqueeze(1)
        noisy = scores + reference.gumbel_noise(seeds, positions, size)
        # Logarithms of two libraries differ in the last bit, and what is drawn where two tokens are that close.
        reached = noisy.gather(1, drawn.unsqueeze(1)).squeeze(1)
        close(reached, noisy.amax(-1), 2e-6, 2e-6)

    def check_floors(rows: int, size: int) -> None:
        logits, heat = randn(setting, rows, size, dtype=torch.float32, scale=3), temperatures(rows)
        limits = Limits(
            (torch.randint(0, min(size, 200), (rows,)) * (torch.rand(rows) < 0.7)).to(device),
            torch.where(torch.rand(rows) < 0.7, torch.rand(rows) * 0.98 + 0.01, 1.0).to(device),
            (torch.rand(rows) * 0.05 * (torch.rand(rows) < 0.5)).to(device),
        )
        got = floors.score_floors(logits, heat, limits)
        wide = (logits - logits.amax(-1, keepdim=True)) / heat.unsqueeze(1)
        kept = (wide >= got.unsqueeze(1)).sum(-1)
        # Sums in another order may differ about the token at the edge, if with it the sum is p but for rounding.
        least, most = (
            (wide >= reference_sampling.score_floors(logits, heat, nudged).unsqueeze(1)).sum(-1)
            for nudged in (limits._replace(top_p=limits.top_p + nudge) for nudge in (-1e-5, 1e-5))
        )
        outside = (kept < least) | (kept > most)
        assert not outside.any(), f"rows {outside.nonzero().flatten().tolist()} keep {kept[outside].tolist()} tokens"

    def check_grammar(rows: int, size: int) -> None:
        logits = randn(setting, rows, size, dtype=torch.float32)
        wanted = logits.clone()
        masked = torch.arange(0, rows, 2).to(device)
        words = torch.randint(-(2**31), 2**31, (len(masked), size // 32 + 1), dtype=torch.int32).to(device)
        grammar.apply_token_bitmask(logits, words, masked)
        bitmask.apply_token_bitmask(wanted, words, masked)
        equal(logits, wanted)

    for rows, size in shapes:
        for dtype in dtypes(setting):
            yield f"sampling.largest: {rows}x{size} {short(dtype)}", partial(check_largest, rows, size, dtype)
            yield f"sampling.gumbel_argmax: {rows}x{size} {short(dtype)}", partial(check_draw, rows, size, dtype)
        yield f"floors.score_floors: {rows}x{size}", partial(check_floors, rows, size)
        yield f"grammar.apply_token_bitmask: {rows}x{size}", partial(check_grammar, rows, size)


def _logprobs(setting: Setting) -> Iterator[tuple[str, Check]]:
    shapes = [(3, 300), (2, 8200)] if setting.interpreted else [(1, 5), (5, 8200), (66, 151_936)]

    def check(rows: int, size: int, dtype: torch.dtype) -> None:
        logits = randn(setting, rows, size, dtype=dtype, scale=5)
        token_ids = torch.randint(0, size, (rows,)).to(setting.device)
        got, ranks, top_values, top_token_ids = logprobs.token_logprobs(logits, token_ids, 20)
        exact = logits.double().log_softmax(-1)
        chosen = exact.gather(1, token_ids.unsqueeze(1))
        close(got.double(), chosen.squeeze(1), 1e-6, 1e-5)
        equal(ranks, (logits > logits.gather(1, token_ids.unsqueeze(1))).sum(-1) + 1)
        order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :20]
        equal(top_token_ids, order)
        close(top_values.double(), exact.gather(1, order), 1e-6, 1e-5)
        found = logprobs.likeliest(logits, 20)
        equal(found.token_ids, order)
        equal(found.values, logits.float().gather(1, order))

    for rows, size in shapes:
        for dtype in dtypes(setting):
            yield f"logprobs: {rows}x{size} {short(dtype)}", partial(check, rows, size, dtype)


def _penalties(setting: Setting) -> Iterator[tuple[str, Check]]:
    device = setting.device

    def check(vocab_size: int) -> None:
        in_prompt = torch.rand(6, vocab_size) < 0.3
        in_output = torch.randint(-5, 4, (6, vocab_size)).clamp(min=0)
        counts = (in_output + in_prompt * IN_PROMPT).int().to(device)
        slots, rows = torch.randperm(6)[:4].to(device), torch.randperm(6)[:4].to(device)
        logits = randn(setting, 6, vocab_size, dtype=torch.float32, scale=4)
        wanted = logits.clone()
        factors = ((torch.rand(4) * span + 0.1).to(device) for span in (2, 4, 4))
        asked = Penalties(rows, slots, *factors)
        penalties.apply_penalties(logits, counts, asked)
        reference_sampling.apply_penalties(wanted, counts, asked)
        close(logits, wanted, 1e-6, 1e-6)

    for vocab_size in (31, 2049) if setting.interpreted else (1, 31, 2049, 151_936):
        yield f"penalties: {vocab_size} tokens", partial(check, vocab_size)
