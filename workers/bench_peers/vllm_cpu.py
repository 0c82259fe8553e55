"""vLLM on a CPU, with prefix caching; threads and KV space come through the environment, as its manual has it."""

import os
from typing import Any

import vllm


def load(model: str, threads: int, options: dict[str, Any]) -> Any:
    """Load a folder in bfloat16; `options` are further arguments of `vllm.LLM`. Its environment says `threads` too."""
    if len(os.environ["VLLM_CPU_OMP_THREADS_BIND"].split(",")) != threads:
        raise ValueError(f"VLLM_CPU_OMP_THREADS_BIND does not name {threads} cores")
    settings = {"dtype": "bfloat16", "max_model_len": 2048, "enable_prefix_caching": True, **options}
    llm = vllm.LLM(model, **settings)

    def generate(rows: list[dict[str, Any]]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": row["prompt"]} for row in rows]
        params = [vllm.SamplingParams(temperature=0, max_tokens=row["new_tokens"], ignore_eos=True) for row in rows]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def versions() -> dict[str, str]:
    return {"vllm": vllm.__version__}
