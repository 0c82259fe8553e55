"""Checkpoints that come quantised: dequantised where the device has no such products, and multiplied as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import FineGrainedFP8Config, MixtralConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from engine.capacity import kv_capacity
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, ModelNotSupported
from engine.loader import LoadedModel, ModelFileInvalid, load
from engine.loader.quantization import folder_tensors
from engine.loader.quantized import QuantizedTensors
from kernels import reference_quantized as reference
from kernels.linear import Linear, packers
from kernels.reference_quantized import Float8Weight, Int4Weight
from tests.engine.families import SMALL, random_model
from tests.engine.kernel_tables import use_kernels
from tests.engine.models_fixture import PagedRun, tiny_llama
from tests.engine.quantized_fixture import awq, float8, gptq

CPU = torch.device("cpu")
VOCABULARY = 320
# Query, key and value of whole blocks of float8.
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 16, "num_key_value_heads": 8}

Writer = Callable[..., tuple[Path, Path]]
WRITERS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (awq, {}),
    "awq, a group of all inputs": (awq, {}),
    "gptq": (gptq, {}),
    "gptq, symmetric": (gptq, {"sym": True}),
    "gptq, desc_act in order": (gptq, {"desc_act": True}),
    "gptq version 2": (gptq, {"checkpoint_format": "gptq_v2", "zero_offset": 0}),
    "float8": (float8, {}),
}


def written(path: Path, name: str, **model: Any) -> tuple[Path, Path]:
    writer, options = WRITERS[name]
    return writer(tiny_llama(path / "model", dtype="bfloat16", **model), path, **options)


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    found = load(str(folder), device=CPU, dtype=dtype, **options)
    assert isinstance(found, LoadedModel)
    return found


def logits(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    run = PagedRun(loaded(folder, dtype, **options).decoder)
    with torch.inference_mode():
        return run.step({"a": list(range(40))})["a"]


def int4_packers() -> Any:
    return packers(lambda weight, bias: lambda x: reference.int4_linear(x, weight, bias))


def float8_packers() -> Any:
    return packers(lambda weight, bias: lambda x: reference.float8_linear(x, weight, bias))


def wide_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Of float32 sums, as the reference products are."""
    return lambda x: F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def wide_linear_of_float8(weight: Tensor, bias: Tensor | None) -> Linear:
    """As `wide_linear`, with activations in float8 for all but the head."""
    if len(weight) == VOCABULARY:
        return wide_linear(weight, bias)

    def apply(x: Tensor) -> Tensor:
        values, scales = reference.quantize_float8_groups(x)
        rounded = values.float() * scales.T.repeat_interleave(128, 1)[:, : x.shape[1]]
        return F.linear(rounded, weight.float()).to(x.dtype)

    return apply


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_computes_with_what_the_weights_stand_for(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    quantized, plain = written(tmp_path, name)
    assert torch.equal(logits(quantized, dtype), logits(plain, dtype))


def test_int8_goes_on_from_what_the_weights_stand_for(tmp_path: Path) -> None:
    quantized, plain = written(tmp_path, "awq")
    int8 = logits(quantized, torch.bfloat16, quantize="int8")
    assert torch.equal(int8, logits(plain, torch.bfloat16, quantize="int8"))
    assert not torch.equal(int8, logits(plain, torch.bfloat16))


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "float8"])
def test_where_there_are_products_of_four_bits_they_multiply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    quantized, plain = written(tmp_path, name)
    joined: list[Int4Weight] = []
    int4 = packers(lambda weight, bias: joined.append(weight) or int4_packers().linear(weight, bias))
    use_kernels(monkeypatch, pack_linear=wide_linear, pack_gate_up=packers(wide_linear).gate_up, int4=int4)
    assert torch.equal(logits(quantized, torch.bfloat16), logits(plain, torch.bfloat16))
    # Query, key and value; attention's output; gate and up; down: of two layers.
    assert [weight.out_features for weight in joined] == 2 * [128, 64, 192, 64]
    assert all((weight.zeros is None) == ("symmetric" in name) for weight in joined)


@pytest.mark.parametrize("model", [{}, WIDE], ids=["blocks are cut by parts", "whole blocks"])
def test_where_there_are_products_of_float8_they_multiply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, int]
) -> None:
    quantized, plain = written(tmp_path, "float8", **model)
    packed: list[Float8Weight] = []
    of_float8 = packers(lambda weight, bias: packed.append(weight) or float8_packers().linear(weight, bias))
    use_kernels(monkeypatch, pack_linear=wide_linear, pack_gate_up=packers(wide_linear).gate_up, float8=of_float8)
    found = logits(quantized, torch.bfloat16)
    sizes = [len(weight.values) for weight in packed]
    # Parts whose blocks do not meet are multiplied one by one.
    assert sizes == 2 * ([512, 256, 768, 256] if model else [64, 32, 32, 64, 96, 96, 64])
    gate_up = packers(wide_linear_of_float8).gate_up
    use_kernels(monkeypatch, pack_linear=wide_linear_of_float8, pack_gate_up=gate_up)
    torch.testing.assert_close(found, logits(plain, torch.bfloat16), atol=0.05, rtol=0.02)


def test_experts_are_multiplied_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**SMALL, "hidden_size": 128, "num_local_experts": 3, "dtype": "bfloat16"}
    random_model(MixtralConfig(**small)).save_pretrained(tmp_path / "model")
    quantized, plain = awq(tmp_path / "model", tmp_path)
    assert torch.equal(logits(quantized), logits(plain))
    of_four_bits: list[Int4Weight] = []
    int4 = packers(lambda weight, bias: of_four_bits.append(weight) or int4_packers().linear(weight, bias))
    use_kernels(monkeypatch, pack_linear=wide_linear, pack_gate_up=packers(wide_linear).gate_up, int4=int4)
    assert torch.equal(logits(quantized, torch.bfloat16), logits(plain, torch.bfloat16))
    assert [weight.out_features for weight in of_four_bits] == 2 * ([256, 128] + 3 * [192, 128])


def test_linears_that_are_left_out_keep_their_dtype_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "model", dtype="bfloat16")
    tensors = load_file(model / "model.safetensors")
    quantized, plain = awq(model, tmp_path)
    for folder in (quantized, plain):
        mixed = load_file(folder / "model.safetensors")
        for layer in range(2):
            module = f"model.layers.{layer}.self_attn.k_proj"
            mixed = {name: tensor for name, tensor in mixed.items() if not name.startswith(module)}
            mixed[f"{module}.weight"] = tensors[f"{module}.weight"]
        save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(quantized), logits(plain))
    entries = {"pack_linear": wide_linear, "pack_gate_up": packers(wide_linear).gate_up}
    use_kernels(monkeypatch, **entries, int4=int4_packers())
    torch.testing.assert_close(logits(quantized, torch.bfloat16), logits(plain, torch.bfloat16), atol=0.05, rtol=0.02)


def test_float32_activations_meet_dequantised_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, plain = written(tmp_path, "awq")
    wanted = logits(plain)
    use_kernels(monkeypatch, int4=packers(lambda weight, bias: pytest.fail("packed")))
    assert torch.equal(logits(quantized), wanted)


def test_what_stays_quantised_is_not_quantised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = written(tmp_path, "awq")
    use_kernels(monkeypatch, int4=int4_packers())
    with pytest.raises(ConfigError, match="weights are quantised, and quantize is int4"):
        loaded(quantized, torch.bfloat16, quantize="int4")


def test_float8_blocks_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", dtype="bfloat16", **WIDE)
    quantized, _ = float8(model, tmp_path)
    source = folder_tensors(quantized, torch.bfloat16)
    stored = load_file(quantized / "model.safetensors")
    theirs = Fp8Dequantize(_Quantizer())
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"model.layers.1.{module}.weight"
        wanted = theirs._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.bfloat16)
        assert torch.equal(source.read(name), wanted)


class _Quantizer:
    quantization_config = FineGrainedFP8Config()


def edited(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_groups_out_of_order_are_refused(tmp_path: Path) -> None:
    folder, _ = gptq(tiny_llama(tmp_path / "model"), tmp_path, desc_act=True, shuffled=True)
    with pytest.raises(ModelNotSupported, match=r"layers\.0\.self_attn\.q_proj was quantised in the order of.*static"):
        loaded(folder)


def test_biases_that_are_more_than_zeros_are_not_left_out(tmp_path: Path) -> None:
    folder, _ = written(tmp_path, "gptq")
    edited(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.bias"].fill_(1))
    with pytest.raises(ModelNotSupported, match=r"no place for tensors.*layers\.1\.mlp\.up_proj\.bias"):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("awq", lambda t: t.pop("model.layers.0.mlp.up_proj.scales"), r"lacks.*up_proj\.scales"),
        (
            "awq",
            lambda t: t.update({"model.layers.0.mlp.up_proj.qzeros": torch.zeros(1, 1).int()}),
            r"qzeros is \(1,",
        ),
        ("gptq, desc_act in order", lambda t: t.pop("model.layers.0.mlp.up_proj.g_idx"), r"lacks.*up_proj\.g_idx"),
        (
            "float8",
            lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale_inv"),
            r"up_proj\.weight is float8",
        ),
        (
            "float8",
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}),
            r"up_proj\.weight is torch\.float32",
        ),
        ("awq", lambda t: [t.pop(name) for name in list(t) if name.endswith("qweight")], "no tensor ends in .qweight"),
    ],
)
def test_tensors_that_do_not_go_together_are_named(tmp_path: Path, name: str, change: Any, said: str) -> None:
    folder, _ = written(tmp_path, name)
    edited(folder, change)
    with pytest.raises(ModelFileInvalid, match=said):
        loaded(folder)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised with bitsandbytes do not run.*awq.*gptq.*fp8.*mxfp4"),
        ("aqlm", "quantised with aqlm do not run"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq and version gemv"),
        ({"quant_method": "awq", "bits": 3}, "awq and bits 3"),
        ({"quant_method": "gptq", "bits": 8}, "gptq and bits 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq and checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "gptq and dynamic"),
        ({"quant_method": "fp8"}, "fp8 and weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"fp8 and weight_block_size \[64, 128\]"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "fp8 and activation_scheme static",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "group_size is 'all', not a number"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": 1}, "desc_act is 1, not true or false"),
    ],
)
@pytest.mark.parametrize("model_impl", ["native", "auto"])
def test_what_is_not_served_is_named_with_what_is(tmp_path: Path, described: Any, said: str, model_impl: str) -> None:
    folder = tiny_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    with pytest.raises(EngineError, match=said):
        loaded(folder, model_impl=model_impl)


def test_groups_that_no_run_of_32_inputs_fills_are_refused(tmp_path: Path) -> None:
    folder, _ = awq(tiny_llama(tmp_path / "model"), tmp_path, group_size=16)
    with pytest.raises(ModelNotSupported, match=r"\d\d inputs in groups of 16"):
        loaded(folder)


def test_a_weight_is_dequantised_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, plain = written(tmp_path, "awq")
    whole = {name: tensor.float() for name, tensor in load_file(plain / "model.safetensors").items()}
    monkeypatch.setattr("engine.loader.quantized._ROWS_AT_A_TIME", 40)
    source = folder_tensors(quantized, torch.float32)
    assert isinstance(source, QuantizedTensors)
    module = "model.layers.0.mlp.up_proj"
    assert torch.equal(source.read(f"{module}.weight"), whole[f"{module}.weight"])
    packed = source.packed(module, CPU)
    assert isinstance(packed, Int4Weight)
    assert torch.equal(reference.dequantize_int4(packed), whole[f"{module}.weight"])


@pytest.mark.parametrize(("name", "model"), [("awq", {}), ("gptq, symmetric", {}), ("float8", {}), ("float8", WIDE)])
def test_what_fits_is_told_by_the_bytes_that_a_device_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: dict[str, int]
) -> None:
    folder, plain = written(tmp_path, name, **model)
    packed: list[Int4Weight | Float8Weight] = []
    listed = packers(lambda weight, bias: packed.append(weight) or wide_linear(torch.zeros(1, 1), None))
    use_kernels(monkeypatch, int4=listed, float8=listed)
    loaded(folder, torch.bfloat16)
    tensors = load_file(plain / "model.safetensors")
    kept = sum(tensor.numel() for name, tensor in tensors.items() if "proj" not in name)
    held = 2 * kept + sum(tensor.nbytes for weight in packed for tensor in weight if tensor is not None)
    biases = 2 * sum(
        tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items() if "bias" in name
    )
    on_gpu, on_cpu = (
        kv_capacity(EngineConfig(str(folder), dtype="bfloat16", device=device), size)
        for device, size in (("auto", 24 * 2**30), ("cpu", None))
    )
    assert on_gpu is not None
    assert on_cpu is not None
    assert on_gpu.weight_bytes == held + biases
    assert on_cpu.weight_bytes == 2 * sum(tensor.numel() for tensor in tensors.values()) + biases
