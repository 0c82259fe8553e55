"""OpenVINO GenAI's continuous batching on a CPU, from a folder with OpenVINO's files."""

from typing import Any

import numpy as np
import openvino
import openvino_genai


def load(model: str, threads: int, options: dict[str, Any]) -> Any:
    """Load a folder with bfloat16 as the precision of what is computed; `options` are fields of `SchedulerConfig`."""
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in {"cache_size": 4, "enable_prefix_caching": True, **options}.items():
        setattr(scheduler, name, value)
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(rows: list[dict[str, Any]]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([row["prompt"]], dtype=np.int64)) for row in rows]
        configs = [_greedy(row["new_tokens"]) for row in rows]
        return [list(result.m_generation_ids[0]) for result in pipe.generate(prompts, configs)]

    return generate


def _greedy(new_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = new_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def versions() -> dict[str, str]:
    return {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
