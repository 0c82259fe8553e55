"""What structured output costs: tokens per second of rows that each keep to a schema of their own, and of free rows.

    python -m tests.bench.structured_output [--rows 200] [--tokens 128] [--rounds 3] [--temperature 0]

Both ways the same prompts get the same number of tokens: free rows ignore the end, and the schemas ask for more than
fits. The two take turns, and each round has new schemas, so that compiling them is part of the time. With a temperature
above 0 a draw among few allowed tokens is cheaper than one from the whole vocabulary: 0 shows the cost alone.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from engine import LLM, SamplingParams, StructuredOutput
from tests.engine.schemas import schemas


def endless(schema: dict[str, Any]) -> dict[str, Any]:
    """A list of more objects than an answer has room for."""
    kept = ("$schema", "$defs")
    items = {name: value for name, value in schema.items() if name not in kept}
    # With all of its properties required, an object is never just `{}`.
    items["required"] = list(items["properties"])
    return {**{name: schema[name] for name in kept}, "type": "array", "items": items, "minItems": 1000}


def tokens_per_second(llm: LLM, prompts: list[list[dict[str, str]]], params: list[SamplingParams]) -> float:
    start = time.perf_counter()
    outputs = llm.chat(prompts, params)
    seconds = time.perf_counter() - start
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if counts != [p.max_tokens for p in params]:
        raise SystemExit("not every row has the tokens it was to have: the two ways cannot be compared")
    return sum(counts) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()

    llm = LLM(options.model, dtype=options.dtype, max_num_seqs=options.rows, enable_prefix_caching=False)
    prompts = [[{"role": "user", "content": f"Describe {n} things you see, as JSON."}] for n in range(options.rows)]
    common = {"max_tokens": options.tokens, "temperature": options.temperature}
    free = [SamplingParams(**common, ignore_eos=True, seed=n) for n in range(options.rows)]
    warm_up = StructuredOutput(regex="[a-z]{99}")  # so that no round prepares the tokenizer
    llm.generate(["a"], SamplingParams(max_tokens=4, structured_output=warm_up))
    ratios = []
    for number in range(options.rounds):
        asked = [endless(schema) for schema in schemas(options.rows, seed=number)]
        structured = [
            SamplingParams(**common, seed=n, structured_output=StructuredOutput(json=schema))
            for n, schema in enumerate(asked)
        ]
        speeds = [tokens_per_second(llm, prompts, params) for params in (free, structured)]
        ratios.append(speeds[1] / speeds[0])
        sys.stdout.write(
            f"round {number + 1}: free {speeds[0]:.0f} tokens/s, structured {speeds[1]:.0f} tokens/s, "
            f"{ratios[-1]:.1%} of free\n"
        )
        sys.stdout.flush()
    sys.stdout.write(
        f"{options.rows} rows of {options.tokens} tokens, {options.rows} schemas a round: "
        f"structured output costs {1 - statistics.median(ratios):.1%} of the free throughput (median)\n"
    )


if __name__ == "__main__":
    main()
