"""What a model of Transformers asks of attention, learnt from a forward pass of one token.

Configurations name these things differently from family to family; what a model's layers ask for when they run is what
counts. The probe also sees what a check of a short prompt cannot: masks that differ only far from a query.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.models.fallback import PAGED_ATTENTION, AttentionLayer, CannotPage, attention_function

_PROBE = "pagemill_probe"


class ProbedAttention(NamedTuple):
    """The attention layers of a model, in the order in which they run, and the sizes that they share."""

    layers: dict[nn.Module, AttentionLayer]
    num_heads: int
    num_kv_heads: int
    head_dim: int  # the largest of queries', keys' and values'


def probe_attention(model: PreTrainedModel, max_position_embeddings: int) -> ProbedAttention:
    """Run `model` on one token, and leave it with `PAGED_ATTENTION`. Raises `CannotPage`."""
    probe = _Probe(max_position_embeddings)
    AttentionMaskInterface.register(_PROBE, _mask_function(max_position_embeddings))
    model.set_attn_implementation(_PROBE)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model.base_model(input_ids=token, position_ids=token, use_cache=False, paged_step=probe)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise CannotPage(f"its forward pass fails with an attention that is not its own ({error})") from error
    model.set_attn_implementation(PAGED_ATTENTION)
    return probe.result()


class _WindowMask(Tensor):
    """A mask that says which window it stands for. Whatever is computed from it is a plain tensor."""

    window: int | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _Probe:
    """Notes each call of attention, and answers zeros; an `Attention`."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._layers: dict[nn.Module, AttentionLayer] = {}
        self._num_heads: set[int] = set()
        self._num_kv_heads: set[int] = set()
        self._head_dim = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        if module in self._layers:
            raise CannotPage("it runs an attention layer more than once for a token")
        if options.get("position_bias") is not None:
            raise CannotPage("its attention adds a bias for positions")
        if options.get("is_causal") is False:
            raise CannotPage("its attention is not causal")
        if not isinstance(mask, _WindowMask):
            raise CannotPage("its layers attend by a mask of their own, or by none")
        window = options.get("sliding_window")
        if window is not None and window >= self._longest:
            window = None
        if window != mask.window:
            raise CannotPage(f"a layer asks for a window of {window} and for a mask of {mask.window}")
        if key.shape[2] != query.shape[2]:
            raise CannotPage("it attends to more than the tokens of the text")
        self._layers[module] = AttentionLayer(len(self._layers), window)
        self._num_heads.add(query.shape[1])
        self._num_kv_heads.add(key.shape[1])
        self._head_dim = max(self._head_dim, query.shape[-1], value.shape[-1])
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def result(self) -> ProbedAttention:
        if not self._layers:
            raise CannotPage("it never calls Transformers' attention interface")
        if len(self._num_kv_heads) > 1:
            counts = ", ".join(map(str, sorted(self._num_kv_heads)))
            raise CannotPage(f"its layers differ in their number of KV heads ({counts})")
        (num_kv_heads,) = self._num_kv_heads
        return ProbedAttention(self._layers, max(self._num_heads), num_kv_heads, self._head_dim)


def _mask_function(longest: int) -> Callable[..., _WindowMask]:
    def mask(*, mask_function: Callable[..., Tensor], **_: Any) -> _WindowMask:
        marked = torch.zeros(1, 1, 1, 1).as_subclass(_WindowMask)
        marked.window = window_of_mask(mask_function, longest)
        return marked

    return mask


def window_of_mask(visible: Callable[..., Tensor], longest: int) -> int | None:
    """Return the window of the mask that `visible` defines over positions below `longest`, None for all of the past.

    Raises `CannotPage` if it is neither causal nor a window.
    """
    windows: set[int | None] = set()
    zero = torch.zeros(1, dtype=torch.int64)
    keys = torch.arange(longest)
    for query in (longest // 2, longest - 1):
        seen = visible(zero, zero, zero + query, keys).expand(longest)
        count = int(seen.sum())
        if not torch.equal(seen, (keys <= query) & (keys > query - count)):
            raise CannotPage("its attention mask is neither causal nor a sliding window")
        windows.add(count if count <= query else None)
    if len(windows) == 1:
        return windows.pop()
    # A window wider than half of the positions hides nothing from the query in the middle.
    narrow = windows - {None}
    if len(narrow) != 1:
        raise CannotPage("its attention mask is neither causal nor a sliding window")
    return narrow.pop()


AttentionInterface.register(_PROBE, attention_function)
