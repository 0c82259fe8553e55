"""`pagemill run-batch`: what `vllm run-batch` does, with its flags and its output, so that only the name changes.

What differs on purpose: a row that cannot run is a line with its error, where vLLM ends with nothing done; memory does
not grow with the file; a run that was stopped is taken up by the same command.
"""

import shutil
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jobs.cli.options import EngineOptions, Json, with_groups
from jobs.cli.run import run_here, state_folder, taken_up
from jobs.cli.show import print_errors, print_json, stdout
from jobs.errors import EXIT_DONE, EXIT_JOB_FAILED, UsageError
from jobs.formats.jsonl import iter_lines
from jobs.layout import absolute_url
from jobs.local.alone import alone_in
from jobs.settings import settings
from jobs.spec import JobSpec, OpenAIRows
from jobs.storage import Stores
from jobs.submit import prepare
from jobs.vllm_lines import vllm_lines

FOREIGN_FLAGS: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}
"""For the command's context: flags that are vLLM's and not ours are refused by the command, which knows why."""

_GIB = 1024**3
_MAX_LINE = 1024 * 1024 * 1024

# What these ask for is always so.
_GIVEN = frozenset(
    {"enable-chunked-prefill", "disable-log-requests", "disable-log-stats", "no-enable-log-requests"}
    | {"enable-prompt-tokens-details", "enable-force-include-usage"}
)
_PARALLEL = "a model runs on one device here; `pagemill up --workers N` runs several of them"
_CHECKPOINT = "it is read from the model's own files"
_NO_SERVER = "there is no server; `pagemill report` and `status` say how a job does"
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("tensor-parallel-size", "tp", "pipeline-parallel-size", "pp"), _PARALLEL),
    **dict.fromkeys(("data-parallel-size", "dp", "distributed-executor-backend"), _PARALLEL),
    **dict.fromkeys(("quantization", "q", "load-format", "rope-scaling", "hf-overrides", "config-format"), _CHECKPOINT),
    **dict.fromkeys(
        ("tokenizer", "tokenizer-mode", "tokenizer-revision", "chat-template", "runner", "task"), _CHECKPOINT
    ),
    **dict.fromkeys(("enable-metrics", "host", "port", "url"), _NO_SERVER),
    **dict.fromkeys(("tool-call-parser", "enable-auto-tool-choice", "reasoning-parser"), "tools are not served"),
    "kv-cache-dtype": "the KV cache has the model's dtype",
    "lora-modules": "a row names its adapter in body.lora, and --max-loras makes room for them",
    "speculative-config": "there is no speculative decoding",
    "limit-mm-per-prompt": "prompts are text",
    "output-tmp-dir": "what a run needs lies beside the output while it runs",
    "no-enable-chunked-prefill": "prefill is always chunked",
    "generation-config": "rows and the engine's defaults decide",
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Those of vLLM's engine arguments that mean something here, under its names."""

    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, int8 (CPU) or fp8 (GPU).")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")] = None
    max_num_seqs: Annotated[int | None, typer.Option(help="Most rows in one step.")] = None
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in one step.")] = None
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of a GPU's memory to use.")] = None
    async_scheduling: Annotated[
        bool | None,
        typer.Option("--async-scheduling/--no-async-scheduling", help="Launch steps ahead. Default: with a GPU."),
    ] = None
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Replay no CUDA graphs.")] = False
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.")] = None
    swap_space: Annotated[float | None, typer.Option(help="GiB of host memory for preempted rows.")] = None
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Default: yes."),
    ] = None
    model_impl: Annotated[str | None, typer.Option(help="auto, native or transformers.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="Serve adapters that rows name.")] = False
    max_loras: Annotated[int, typer.Option(min=1, help="Most adapters in memory, with --enable-lora.")] = 1
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Highest rank of an adapter.")] = 16

    @property
    def engine(self) -> EngineOptions:
        return EngineOptions(
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            model_impl=self.model_impl,
            trust_remote_code=self.trust_remote_code,
            gpu_memory_utilization=self.gpu_memory_utilization,
            async_scheduling=self.async_scheduling,
            enforce_eager=self.enforce_eager,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            max_loras=self.max_loras if self.enable_lora else None,
            max_lora_rank=self.max_lora_rank if self.enable_lora else None,
            swap_space=None if self.swap_space is None else int(self.swap_space * _GIB),
        )


@with_groups
def run_batch(
    context: typer.Context,
    input_file: Annotated[str, typer.Option("--input-file", "-i", help="OpenAI batch lines: a path or URL.")],
    output_file: Annotated[str, typer.Option("--output-file", "-o", help="Where the results go: a path or URL.")],
    model: Annotated[str, typer.Option(help="A folder, a .gguf file or a hub id.")],
    engine: VllmOptions,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What rows call the model, beside --model. May be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling of rows without a seed of their own.")] = 0,
    response_role: Annotated[str, typer.Option(help="Only 'assistant'.")] = "assistant",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of taking up a run that was stopped.")
    ] = False,
    json: Json = False,
) -> None:
    """Do what `vllm run-batch` does: the same flags, the same lines."""
    _refuse(context.args)
    if response_role != "assistant":
        raise UsageError(f"--response-role {response_role}: answers are the assistant's here.")
    output_url = absolute_url(output_file)
    folder = state_folder(output_file)
    config = settings().model_copy(update={"state_dir": folder, "redis_url": "", "storage": ""})
    stores = Stores(config)
    with alone_in(folder, fresh=fresh):
        stores.check_writable(output_url)
        spec = prepare(
            input_file,
            model=model if revision is None else f"{model}@{revision}",
            stores=stores,
            settings=config,
            rows=OpenAIRows(),
            on_bad_row="skip",
            model_aliases=(model, *(served_model_name or ())),
            # The noise of a row without a seed follows from the job's id and the row's place.
            job_id=f"run-batch-{seed}",
        )
        view, _ = run_here(taken_up(spec, config), config, engine.engine, quiet=json)
        if view.state == "completed":
            _write(spec, view.rows or 0, view.output_url, view.error_url, output_url, stores)
            shutil.rmtree(folder)
    if json:
        print_json({**view.as_dict(), "output_url": output_url, "error_url": None})
    else:
        print_errors(view)
        stdout.print(f"{view.state}: {view.done} rows answered, {view.failed} failed; {output_file}")
    # vLLM's exit code says that it ran to the end, whatever became of the rows.
    raise typer.Exit(EXIT_DONE if view.state == "completed" else EXIT_JOB_FAILED)


def _refuse(foreign: list[str]) -> None:
    for argument in foreign:
        if not argument.startswith("-"):
            continue
        name = argument.lstrip("-").partition("=")[0].replace("_", "-")
        if name in _GIVEN:
            continue
        if name in _REFUSED:
            raise UsageError(
                f"{argument.partition('=')[0]} is not for pagemill: {_REFUSED[name]}.", hint="Leave it out."
            )
        raise UsageError(f"No such option: {argument}.", hint="`pagemill run-batch --help` lists those that there are.")
    values = [argument for argument in foreign if not argument.startswith("-")]
    if values:
        raise UsageError(f"Unexpected argument: {values[0]}.")


def _write(spec: JobSpec, rows: int, output_url: str, error_url: str | None, result_url: str, stores: Stores) -> None:
    def lines(url: str | None) -> Any:
        pieces = stores.stream(url) if url else iter(())
        return (line.data for line in iter_lines(pieces, _MAX_LINE) if line.data is not None)

    with stores.writer(result_url) as writer:
        for line in vllm_lines(spec, rows, lines(output_url), lines(error_url)):
            writer.write(line)
