"""What a step's hidden states add to the vectors of the requests that pool."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device import Device
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


def sum_tokens(hidden: Tensor, places: Sequence[range], device: Device) -> Tensor:
    """Sum rows of `hidden` `[num_tokens, size]`: one sum for each range of places, `[len(places), size]` float32.

    The sum of no row is 0. The order of summation does not depend on the other ranges.
    """
    if all(len(wanted) == 1 for wanted in places):
        (rows,) = device.upload(np.array([wanted.start for wanted in places]))
        return hidden[rows].float()
    # One after the other: torch.segment_reduce does the same in one call, and takes forty times as long on a CPU.
    return torch.stack([hidden[wanted.start : wanted.stop].sum(0, dtype=torch.float32) for wanted in places])
