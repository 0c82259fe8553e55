"""How much memory loading takes at its peak, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.loader.pages import empty_in_own_pages

# Two shards of 150 MB each: large beside what a process takes for other things.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
# The kernel keeps the peak of a process's resident memory, pages of mapped files among it, and forgets it when 5 is
# written here. The baseline has all modules imported, and oneDNN set up.
LOAD = """
import sys
from pathlib import Path

import torch

from engine.loader import load
from kernels.ops import kernels_for

def resident(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024

cpu = torch.device("cpu")
kernels_for(cpu).pack_linear(torch.zeros(16, 16, dtype=torch.bfloat16), None)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
loaded = load(sys.argv[1], dtype=None, device=cpu)
print(resident("VmHWM") - before)
"""


def write_model(folder: Path) -> int:
    """Write random weights in two shards, and return their bytes."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hidden, inner, vocab = (CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        module = f"model.layers.{layer}"
        shapes |= {f"{module}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{module}.self_attn.{name}_proj": (hidden // 2, hidden) for name in "kv"}
        shapes |= {f"{module}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{module}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{module}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_() for name, shape in shapes.items()}
    names = sorted(tensors)
    weight_map = {}
    for index, shard in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{index}.safetensors"
        save_file({name: tensors[name] for name in shard}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux' count of resident memory")
def test_a_model_takes_little_more_than_its_weights_while_it_is_loaded(tmp_path):
    weights = write_model(tmp_path)
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    assert 0.95 * weights < peak < 1.15 * weights


@pytest.mark.parametrize("shape", [(3, 5), (1024, 1024)])
def test_memory_of_its_own_pages_is_a_tensor_like_any_other(shape):
    tensor = empty_in_own_pages(shape, torch.bfloat16, torch.device("cpu"))
    tensor.fill_(2)
    assert (tensor.shape, tensor.dtype, float(tensor.float().sum())) == (shape, torch.bfloat16, 2.0 * tensor.numel())
