"""Transformers' continuous batching, by the manager behind `generate_batch`, which takes a length for each row."""

from typing import Any

import torch
import transformers


def load(model: str, threads: int, options: dict[str, Any]) -> Any:
    """Load a folder in bfloat16; `options` are further fields of `GenerationConfig`."""
    torch.set_num_threads(threads)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, **options)

    def generate(rows: list[dict[str, Any]]) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        with loaded.continuous_batching_context_manager(generation_config=config) as manager:
            names = [manager.add_request(row["prompt"], max_new_tokens=row["new_tokens"]) for row in rows]
            while len(answers) < len(rows):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the generation thread has ended before the last answer")
        return [answers[name] for name in names]

    return generate


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}
