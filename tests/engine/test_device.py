"""What is computed on a device never waits for it: on meta tensors, without values, anything that would raises."""

import numpy as np
import pytest
import torch

from engine.batch import sampling_batch
from engine.device import CpuDevice
from engine.plan import PlanRow
from engine.pooling.rows import sum_tokens
from engine.row_slots import RowSlots
from engine.row_state import RowInputs
from engine.sampling.penalties import PenaltyRows
from engine.sampling.prompt_logprobs import compute_prompt_logprobs, wanted_tokens
from engine.sampling.sampler import sample
from engine.scheduler import Scheduler
from engine.structured.grammar import GrammarMask
from kernels.ops import kernels_for
from tests.engine.toy import request, toy_limits

VOCAB_SIZE = 260


class MetaDevice(CpuDevice):
    place = torch.device("meta")

    def upload(self, *arrays):
        return [torch.from_numpy(array).to(self.place) for array in arrays]


def rows_of(*params):
    requests = [request(index, [1, 2, 3], **fields) for index, fields in enumerate(params)]
    return [PlanRow(sequence, 2, 1, 1) for asked in requests for sequence in asked.sequences]


EVERYTHING = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {7: 1.0}},
    {"allowed_token_ids": [5, 6], "min_tokens": 3, "logprobs": 4},
    {"beam_width": 2},
]


@pytest.mark.parametrize("params", [EVERYTHING, *([fields] for fields in EVERYTHING)])
def test_sampling_waits_for_nothing(params):
    device, rows = MetaDevice(), rows_of(*params)
    mask = GrammarMask(*device.upload(np.array([0]), np.zeros((1, 9), dtype=np.int32)))
    batch = sampling_batch(rows, device, PenaltyRows(RowSlots(len(rows))))._replace(grammar=mask)
    draws = sample(torch.empty(len(rows), VOCAB_SIZE, device=device.place), batch, device)
    assert draws.token_ids.shape == (len(rows),)
    assert {tensor.device.type for tensor in draws.tensors()} == {"meta"}


def test_log_probabilities_of_prompts_and_pooled_sums_wait_for_nothing():
    device, rows = MetaDevice(), rows_of({"prompt_logprobs": 3})
    hidden = torch.empty(3, 8, device=device.place)
    wanted = wanted_tokens([rows[0]._replace(start=0, num_tokens=3)])
    weight = torch.empty(8, VOCAB_SIZE, device=device.place)
    tensors = compute_prompt_logprobs(hidden, wanted, lambda states: states @ weight, device)
    assert [tensor.shape for tensor in tensors] == [(2,), (2,), (2, 3), (2, 3)]
    assert sum_tokens(hidden, [range(2, 3), range(1)], device).shape == (2, 8)
    assert sum_tokens(hidden, [range(3), range(1)], device).shape == (2, 8)


def test_meta_tensors_show_what_would_wait():
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(torch.empty(3, device="meta").all())


def test_inputs_from_rows_wait_for_nothing():
    device, limits = MetaDevice(), toy_limits()
    inputs = RowInputs(
        limits.block_size, device, kernels_for(device.place), max_num_seqs=4, max_model_len=limits.max_model_len
    )
    scheduler = Scheduler(limits)
    for index, prompt in enumerate(([1], range(9))):
        scheduler.add(request(index, prompt))
    plan = scheduler.schedule()
    placed = inputs.place(plan)
    assert placed.inputs.token_ids.shape == (10,)
    assert placed.inputs.attention.block_tables.shape == (2, 3)
    inputs.enter(plan.rows)(torch.empty(2, dtype=torch.int64, device=device.place))
