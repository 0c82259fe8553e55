"""LoRA adapters in PEFT's file format, written by hand, and Transformers' models with them merged."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
JOINED = ("self_attn.qkv_proj", "mlp.gate_up_proj")

# What PEFT 0.21 writes, fields that say nothing about the arithmetic left out.
CONFIG = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "target_modules": "all-linear",
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def transformers_model(folder: Path) -> PreTrainedModel:
    # Eager, since other attention of Transformers leaves out what some families do to their scores.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_adapter(
    path: Path,
    base: Path,
    *,
    seed: int,
    linears: tuple[str, ...] = ATTENTION + MLP + JOINED,
    ranks: dict[str, int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter with random factors for these linears of every layer of `base`, and return `path`.

    `ranks` are those of linears whose rank is not `r`; whether the configuration says so as well is the test's matter.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **config}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in transformers_model(base).named_modules():
        linear = next((linear for linear in linears if name.endswith(linear)), None)
        if linear is None:
            continue
        rank = (ranks or {}).get(linear, config["r"])
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * 0.2
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * 0.2
    assert tensors
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def edit(path: Path, **fields: Any) -> Path:
    """Change fields of the adapter's configuration."""
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return path


def merged(base: Path, adapter: Path, scaling: float | dict[str, float]) -> PreTrainedModel:
    """Transformers' model of `base` with `scaling * B @ A` added; scalings may be given by the end of module names."""
    model = transformers_model(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.")
        factor = scaling if isinstance(scaling, float) else _longest_match(scaling, module)
        product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        with torch.no_grad():
            model.get_submodule(module).weight += factor * product
    return model


def _longest_match(scalings: dict[str, float], module: str) -> float:
    return scalings[max((end for end in scalings if module.endswith(end)), key=len)]


def greedy(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Transformers' own greedy answers."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(ids, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        answers.append(output[0, len(prompt) :].tolist())
    return answers
