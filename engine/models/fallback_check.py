"""Paged attention against Transformers' own eager attention, on the weights themselves, before a model is trusted.

Two prompts, the first of them in two chunks, the second beside its second chunk: a model that counts positions for
itself, mixes neighbouring tokens outside of attention, or attends in a way that its calls do not say, differs.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.models.fallback import PAGED_ATTENTION, CannotPage, FallbackDecoder
from kernels.ops import AttentionBatch, allocate_kv_cache

_FIRST, _SECOND, _CUT = 14, 11, 5  # lengths of the two prompts, and of the first's first chunk
_BLOCK_SIZE = 8
_BLOCKS = ((3, 1), (4, 2))  # of the two prompts, none in order
# Half precision rounds differently in two ways of computing the same; a wrong attention is off by about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


def check_against_eager(model: PreTrainedModel, decoder: FallbackDecoder) -> None:
    """Raise `CannotPage` if `decoder`'s logits are not those of `model`, which it was made of, up to rounding."""
    try:
        difference = _difference(model, decoder)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise CannotPage(f"computing two short prompts fails ({error})") from error
    if not difference <= _TOLERANCE[decoder.config.dtype]:
        raise CannotPage(
            f"with paged attention its logits differ from Transformers' own by {difference:.2g} of their spread"
        )


def _difference(model: PreTrainedModel, decoder: FallbackDecoder) -> float:
    """Return how far the logits are apart, relative to their spread: 0 is equal, about 1 unrelated.

    The worst chunk counts, and in a chunk its median token: one token may be routed to another expert by rounding.
    """
    first, second = (_prompt(length, decoder.config.vocab_size, model.device) for length in (_FIRST, _SECOND))
    model.set_attn_implementation("eager")
    expected = [_eager_logits(model, prompt) for prompt in (first, second)]
    model.set_attn_implementation(PAGED_ATTENTION)
    paged = _paged_logits(decoder, first, second)
    wanted = (expected[0][:_CUT], expected[0][_CUT:], expected[1])
    return max(_relative(ours, theirs) for ours, theirs in zip(paged, wanted, strict=True))


def _prompt(length: int, vocab_size: int, device: torch.device) -> Tensor:
    # Spread over the vocabulary, and different for each length.
    return torch.arange(length, device=device) * 7919 * length % vocab_size


def _eager_logits(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=prompt.unsqueeze(0), use_cache=False).logits
    return logits[0].float()


def _paged_logits(decoder: FallbackDecoder, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    config = decoder.config
    kv = allocate_kv_cache(
        config.num_layers, 5, _BLOCK_SIZE, config.num_kv_heads, config.head_dim, config.dtype, first.device
    )

    def logits(token_ids: Tensor, chunks: list[tuple[int, int, int]]) -> Tensor:
        positions, batch = _batch(chunks, first.device)
        return decoder.logits(decoder.forward(token_ids, positions, batch, kv))

    start = logits(first[:_CUT], [(0, 0, _CUT)])
    rest = logits(torch.cat([first[_CUT:], second]), [(0, _CUT, _FIRST), (1, 0, _SECOND)])
    return start, rest[: _FIRST - _CUT], rest[_FIRST - _CUT :]


def _batch(chunks: list[tuple[int, int, int]], device: torch.device) -> tuple[Tensor, AttentionBatch]:
    """Lay out chunks of (prompt, start, end); return their positions and the step's batch."""
    positions = [position for _, start, end in chunks for position in range(start, end)]
    slots = [
        _BLOCKS[prompt][position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
        for prompt, start, end in chunks
        for position in range(start, end)
    ]
    lengths = [end - start for _, start, end in chunks]
    contexts = [end for _, _, end in chunks]
    batch = AttentionBatch(
        query_start=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        seq_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.tensor([_BLOCKS[prompt] for prompt, _, _ in chunks], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        query_lens=tuple(lengths),
        context_lens=tuple(contexts),
    )
    return torch.tensor(positions, device=device), batch


def _relative(ours: Tensor, theirs: Tensor) -> float:
    # What is added to all logits of a token changes nothing, and would hide a difference in a large norm.
    ours, theirs = (logits - logits.mean(-1, keepdim=True) for logits in (ours, theirs))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median())
