"""Mixtures of experts in the engine: who is chosen and what each counts, and what is refused."""

import dataclasses
import json

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from engine.errors import ModelNotSupported
from engine.loader import load
from engine.loader.errors import ModelFileInvalid
from engine.loader.peft import adapter_targets
from engine.models.config import MixtureConfig
from engine.models.moe import MixtureOfExperts
from kernels.ops import kernels_for
from tests.engine.families import SMALL, random_model, tokens
from tests.engine.models_fixture import check_same_bits_in_any_company

CPU = torch.device("cpu")
MIXTURE = MixtureConfig(
    num_experts=4,
    experts_per_token=2,
    intermediate_size=8,
    normalized=True,
    bias=False,
    clamped_swiglu=None,
    dense_layers=frozenset(),
)


def route(logits: list[list[float]], **fields) -> tuple[Tensor, Tensor]:
    """Route one token for each list of router logits."""
    config = dataclasses.replace(MIXTURE, **fields)
    mixture = MixtureOfExperts(config, lambda x: x, experts=(), kernels=kernels_for(CPU))
    return mixture.route(torch.tensor(logits))


def test_normalized_weights_are_the_softmax_over_the_chosen():
    expert_ids, weights = route([[0.0, 3.0, -1.0, 2.0], [1.0, 0.5, 4.0, 0.0]])
    assert expert_ids.tolist() == [[1, 3], [2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[3.0, 2.0], [4.0, 1.0]]).softmax(-1))


def test_other_weights_are_shares_of_the_softmax_over_all():
    _, weights = route([[0.0, 3.0, -1.0, 2.0]], normalized=False)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 3.0, -1.0, 2.0]]).softmax(-1)[:, [1, 3]])


def test_of_equal_logits_the_lower_number_is_chosen():
    expert_ids, weights = route([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert expert_ids.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_logits_far_apart_neither_overflow_nor_vanish_into_nan():
    _, shares = route([[-3e38, 3e38, 0.0, 1.0]], normalized=False)
    assert shares.tolist() == [[1.0, 0.0]]


def test_in_bfloat16_a_row_has_the_same_bits_alone_in_company_and_in_chunks(tmp_path):
    random_model(MixtralConfig(**SMALL, num_local_experts=6)).save_pretrained(tmp_path)
    decoder = load(str(tmp_path), dtype=torch.bfloat16, device=CPU).decoder
    rows = {f"row {index}": tokens(20 + 7 * index, index) for index in range(8)}
    check_same_bits_in_any_company(decoder, rows)


def test_adapters_can_change_a_dense_layer_and_no_expert(tmp_path):
    config = Qwen3MoeConfig(**SMALL, num_experts=3, num_experts_per_tok=2, mlp_only_layers=[1])
    random_model(config).save_pretrained(tmp_path)
    targets = adapter_targets(load(str(tmp_path), dtype=torch.float32, device=CPU).decoder.config)
    assert "model.layers.0.self_attn.q_proj" in targets
    assert [module for module in targets if ".mlp." in module] == [
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_more_experts_a_token_than_there_are_is_refused(tmp_path):
    random_model(MixtralConfig(**SMALL, num_local_experts=3)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 4}))
    with pytest.raises(ModelFileInvalid, match="num_experts_per_tok is 4 of 3 experts"):
        load(str(tmp_path), dtype=torch.float32, device=CPU, model_impl="native")


def test_olmoe_with_clipped_projections_is_refused(tmp_path):
    random_model(OlmoeConfig(**SMALL, num_experts=3, num_experts_per_tok=2, clip_qkv=1.0)).save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match="clip_qkv"):
        load(str(tmp_path), dtype=torch.float32, device=CPU, model_impl="native")
