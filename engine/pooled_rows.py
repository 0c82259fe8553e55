"""What a step's hidden states add to the vectors of the requests that pool."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.plan import PlanRow


def wanted_places(rows: Sequence[PlanRow]) -> dict[int, range]:
    """By row, for each that pools: the places in the flat batch of the tokens that its pooler wants."""
    places: dict[int, range] = {}
    first = 0
    for index, row in enumerate(rows):
        request = row.sequence.request
        if request.pooler:
            wanted = request.pooler.wanted(row.start, row.num_tokens, request.num_prompt_tokens)
            places[index] = range(first + wanted.start, first + wanted.stop)
        first += row.num_tokens
    return places


def pool_rows(hidden: Tensor, rows: Sequence[PlanRow]) -> dict[int, np.ndarray]:
    """Sum final hidden states `[num_tokens, hidden_size]` for each row that pools; each sum is float32."""
    places = wanted_places(rows)
    if not places:
        return {}
    sums = sum_tokens(hidden, list(places.values())).cpu().numpy()
    return dict(zip(places, sums, strict=True))


def sum_tokens(hidden: Tensor, places: Sequence[range]) -> Tensor:
    """Sum rows of `hidden` `[num_tokens, size]`: one sum for each range of places, `[len(places), size]` float32.

    The sum of no row is 0. The order of summation does not depend on the other ranges.
    """
    rows = [place for wanted in places for place in wanted]
    chosen = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)].float()
    lengths = torch.tensor([len(wanted) for wanted in places], device=hidden.device)
    sums: Tensor = torch.segment_reduce(chosen, "sum", lengths=lengths, unsafe=True, initial=0)
    return sums
