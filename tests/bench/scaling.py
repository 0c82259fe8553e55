"""How cost grows: model size, rows at a time, and context. One table in Markdown, and one plot.

    python -m tests.bench.scaling [--models 135M 0.6B] [--append] [--tables FOLDER]

The models have random weights: `135M` the shape of SmolLM2-135M, `0.6B` that of Qwen3-0.6B. A point is one decode step
with logits (`rows` sequences of `context` tokens each compute their last), and the prefill of one prompt of `context`
tokens: medians of a few, after one that does not count unless it takes seconds. Points whose KV cache would take more
than --kv-gib are left out, as are those whose step would take longer than --seconds by the operations it needs; nothing
is extrapolated. --append adds models to the figures of an earlier run, so that a run stays short. Writes scaling.json,
scaling.md and scaling.svg.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.machine import usable_cores
from engine.models.config import LayerConfig, ModelConfig, RopeConfig
from engine.models.decoder import Decoder, DecoderWeights, LayerWeights
from engine.models.mlp import DenseFeedForward
from kernels.ops import Linear, kernels_for, kv_bytes_per_token
from tests.bench.machine import processor
from workers.bench_ceilings import gemm_rate
from workers.bench_flops import flops
from workers.bench_step import batch_of

ROWS = (1, 4, 16, 64, 256)
CONTEXTS = (128, 512, 2048, 8192)
# A step so long needs no other before it.
_LONG = 2.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Point:
    """Milliseconds of a step, and the share of the product ceiling that its operations are."""

    model: str
    kind: str  # decode or prefill
    rows: int
    context: int
    milliseconds: float
    share: float


def shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> ModelConfig:
    return ModelConfig(
        architecture="random",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=(LayerConfig(RopeConfig(head_dim)),) * layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max(CONTEXTS),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        dtype=torch.bfloat16,
        attention_scale=head_dim**-0.5,
    )


MODELS = {
    "135M": (
        shape(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152),
        False,
    ),
    "0.6B": (
        shape(layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936),
        True,
    ),
}


def random_decoder(config: ModelConfig, head_norms: bool) -> Decoder:
    """A decoder of that shape, with norms of queries and keys as Qwen3's if `head_norms`."""
    kernels = kernels_for(CPU)
    heads = config.num_heads + 2 * config.num_kv_heads
    one, head_norm = torch.ones(config.hidden_size).bfloat16(), torch.ones(config.head_dim).bfloat16()

    def weight(out_features: int, in_features: int) -> torch.Tensor:
        return (torch.randn(out_features, in_features) * 0.02).bfloat16()

    def linear(out_features: int, in_features: int) -> Linear:
        return kernels.pack_linear(weight(out_features, in_features), None)

    def layer(index: int) -> LayerWeights:
        gate_up = kernels.pack_gate_up(
            weight(2 * config.intermediate_size, config.hidden_size), None, config.activation
        )
        down = linear(config.hidden_size, config.intermediate_size)
        return LayerWeights(
            qkv=linear(heads * config.head_dim, config.hidden_size),
            attention_out=linear(config.hidden_size, config.num_heads * config.head_dim),
            feed_forward=DenseFeedForward(index, gate_up, down),
            input_norm=one,
            feed_forward_norm=one,
            query_norm=head_norm if head_norms else None,
            key_norm=head_norm if head_norms else None,
        )

    embedding = (torch.randn(config.vocab_size, config.hidden_size) * 0.02).bfloat16()
    layers = tuple(layer(index) for index in range(config.num_layers))
    return Decoder(config, DecoderWeights(embedding, layers, one, kernels.pack_linear(embedding, None)))


def points(name: str, options: argparse.Namespace) -> Iterator[Point]:
    config, head_norms = MODELS[name]
    decoder = random_decoder(config, head_norms)
    ceiling = gemm_rate(CPU, torch.bfloat16, 0.4)
    token_bytes = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)
    for context in CONTEXTS:
        for kind, rows in (("prefill", 1), *(("decode", rows) for rows in ROWS)):
            new = context if kind == "prefill" else 1
            work = flops(config, [(context - new, context)] * rows, samples=rows).total
            if rows * context * token_bytes > options.kv_gib * 2**30 or work / ceiling > options.seconds:
                continue
            seconds = step_seconds(decoder, rows, new, context, alone=work / ceiling > _LONG)
            yield Point(name, kind, rows, context, seconds * 1e3, work / ceiling / seconds)


def step_seconds(decoder: Decoder, rows: int, new: int, context: int, *, alone: bool) -> float:
    """The median of a few after one that does not count; `alone`: of one."""
    config = decoder.config
    kv, batch = batch_of(config, CPU, rows=rows, new=new, context=context, layers=config.num_layers)
    token_ids = torch.randint(config.vocab_size, (rows * new,))
    positions = torch.arange(context - new, context).repeat(rows)
    last = torch.arange(new - 1, rows * new, new)
    times: list[float] = []
    while len(times) < 2 or (len(times) < 6 and sum(times) < 1):
        began = time.perf_counter()
        decoder.logits(decoder.forward(token_ids, positions, batch, kv)[last])
        times.append(time.perf_counter() - began)
        if alone:
            return times[0]
    return statistics.median(times[1:])


def markdown(found: list[Point]) -> str:
    lines = ["| model | context | prefill of one | " + " | ".join(f"decode {rows}" for rows in ROWS) + " |"]
    lines.append("|---" * (3 + len(ROWS)) + "|")
    by_place = {(p.model, p.kind, p.rows, p.context): p for p in found}
    for model in dict.fromkeys(p.model for p in found):
        for context in CONTEXTS:
            places = [(model, "prefill", 1, context), *((model, "decode", rows, context) for rows in ROWS)]
            lines.append(f"| {model} | {context:,} | " + " | ".join(_cell(by_place.get(p)) for p in places) + " |")
    return "\n".join(lines)


def _cell(point: Point | None) -> str:
    return "–" if point is None else f"{point.milliseconds:,.1f} ms ({point.share:.0%})"


def plot(found: list[Point], path: Path) -> None:
    """Milliseconds a generated token against rows at a time, a line for each model and context; both axes by powers."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    styles = dict(zip(MODELS, ("-", "--"), strict=True))
    for model in dict.fromkeys(p.model for p in found):
        for number, context in enumerate(CONTEXTS):
            line = [p for p in found if (p.model, p.kind, p.context) == (model, "decode", context)]
            costs = [p.milliseconds / p.rows for p in line]
            label = f"{model}, {context:,} tokens"
            axes.plot([p.rows for p in line], costs, styles[model], marker="o", color=f"C{number}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="rows at a time", ylabel="milliseconds a token")
    axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--tables", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()

    torch.set_num_threads(usable_cores())
    stored = options.tables / "scaling.json"
    found: list[Point] = []
    if options.append:
        kept = (Point(**values) for values in json.loads(stored.read_text(encoding="utf-8")))
        found = [point for point in kept if point.model not in options.models]
    with torch.inference_mode():
        for name in options.models:
            for point in points(name, options):
                sys.stderr.write(f"{point}\n")
                found.append(point)
    found.sort(key=lambda point: list(MODELS).index(point.model))
    stored.write_text(json.dumps([asdict(point) for point in found], indent=1) + "\n", encoding="utf-8")
    note = f'bf16 on {processor()}, {usable_cores()} threads; rows at a time after "decode"; '
    note += "in brackets the share of the measured product rate."
    (options.tables / "scaling.md").write_text(f"{markdown(found)}\n\n{note}\n", encoding="utf-8")
    plot(found, options.tables / "scaling.svg")


if __name__ == "__main__":
    main()
