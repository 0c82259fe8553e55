"""MXFP4 weights against Transformers' own dequantisation, and against the format's definition."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.loader import load
from engine.loader.errors import ModelFileInvalid
from engine.loader.mxfp4 import dequantize_mxfp4
from tests.engine.families import SMALL, random_model
from tests.engine.models_fixture import PagedRun

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_blocks_are_what_transformers_makes_of_them(dtype):
    blocks = torch.randint(0, 256, (3, 24, 5, 16), dtype=torch.uint8)
    scales = torch.randint(1, 248, (3, 24, 5), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for expert in range(3):
        ours = dequantize_mxfp4(blocks[expert], scales[expert], dtype)
        assert ours.dtype == dtype
        # Theirs multiplies from the left.
        assert torch.equal(ours, theirs[expert].T)


def test_the_low_half_of_a_byte_comes_first_and_zero_is_the_smallest_scale():
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x21, 0x7F, 0x80])
    blocks[0, 1, 15] = 0x2A
    weight = dequantize_mxfp4(blocks, torch.tensor([[129, 0]], dtype=torch.uint8), torch.float32)
    assert weight.shape == (1, 64)
    assert weight[0, :6].tolist() == [2.0, 4.0, -24.0, 24.0, 0.0, -0.0]
    assert weight[0, 62:].tolist() == [-(2.0**-127), 2.0**-127]
    assert weight.count_nonzero() == 6


@pytest.mark.parametrize("scale", [1, 100, 127, 200, 250])
def test_bfloat16_holds_every_value_exactly(scale):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.full((1, 16), scale, dtype=torch.uint8)
    exact = dequantize_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_mxfp4(blocks, scales, torch.bfloat16).float(), exact)
    assert exact.unique().tolist() == [
        value * 2.0 ** (scale - 127) for value in (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    ]


def quantised_gpt_oss(folder: Path) -> GptOssForCausalLM:
    """Save a small gpt-oss with random MXFP4 experts in `folder`, as OpenAI does; return it in float32."""
    torch.manual_seed(0)
    config = GptOssConfig(**{**SMALL, "hidden_size": 128, "num_local_experts": 5, "sliding_window": 24}, head_dim=32)
    model = random_model(config)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    return model


def test_a_checkpoint_with_mxfp4_experts_has_the_logits_of_transformers(tmp_path):
    reference = quantised_gpt_oss(tmp_path)
    decoder = load(str(tmp_path), dtype=torch.float32, device=CPU, model_impl="native").decoder
    ids = torch.randint(0, 320, (70,))
    with torch.inference_mode():
        expected = reference(ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(PagedRun(decoder).step({"a": ids.tolist()})["a"], expected, atol=1e-4, rtol=1e-4)


def test_mxfp4_experts_without_their_scales_are_said_to_lack_them(tmp_path):
    quantised_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileInvalid, match=r"layers\.1\.mlp\.experts\.down_proj_scales"):
        load(str(tmp_path), dtype=torch.float32, device=CPU, model_impl="native")
