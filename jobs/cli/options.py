"""Options that several commands share, each declared once.

A command takes a group of them as one parameter of a dataclass type; `with_groups` spells the group out for typer.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from pydantic import ValidationError

from jobs.errors import UsageError
from jobs.inputs import InputOptions
from jobs.output import OutputFormat
from jobs.pooling import Pooling
from jobs.sampling import Sampling, StructuredOutput
from jobs.spec import MAX_LINE_BYTES, PROMPT_WAYS, Format, OnBadRow, OpenAIRows, RecordRows

T = TypeVar("T")

_ROWS, _SAMPLING, _ENGINE = "Rows", "Sampling defaults (a row's own fields win)", "Engine"
_EMBEDDING = "Embedding defaults"
_INPUT = "Input"
_STRUCTURE = "What an answer has to be (one of these)"

INPUT_HELP = (
    "Paths, folders, globs, file:// or s3:// URLs, or '-': JSONL, CSV, TSV or Parquet, the first three also as .gz, "
    ".zst or .bz2."
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JsonLogs = Annotated[bool, typer.Option("--json", help="Log JSON lines for programs.")]
OUTPUT_HELP = (
    "Path or URL of the result, its form by its name: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, "
    "or a folder of parts, with a slash at the end."
)
AsFormat = Annotated[
    OutputFormat | None,
    typer.Option(
        "--output-format",
        help="jsonl, jsonl.gz, jsonl.zst or parquet, where the output's name does not say it.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A name that a worker serves: a folder, a .gguf file, a hub id, 'demo' or 'demo-embed'."
    ),
]


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with each parameter of a dataclass type replaced by that dataclass's fields."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = kind  # type: ignore[assignment]
        field_hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field_hints[field.name]
                )
            )

    @wraps(command)
    def spelled_out(**given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return command(**given)

    spelled_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spelled_out.__annotations__ = {p.name: p.annotation for p in parameters}
    return spelled_out


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the rows are and how to sample."""

    prompt_column: Annotated[
        str | None, typer.Option(help="Rows are records, and this column is the prompt.", rich_help_panel=_ROWS)
    ] = None
    messages_column: Annotated[
        str | None, typer.Option(help="Rows are records, and this column has the messages.", rich_help_panel=_ROWS)
    ] = None
    template: Annotated[
        str | None,
        typer.Option(help="Rows are records, and this Jinja template (or @FILE) the prompt.", rich_help_panel=_ROWS),
    ] = None
    messages_template: Annotated[
        str | None,
        typer.Option(help="The same for a template of the messages as JSON.", rich_help_panel=_ROWS),
    ] = None
    system: Annotated[str | None, typer.Option(help="A system message before each prompt.", rich_help_panel=_ROWS)] = (
        None
    )
    system_template: Annotated[
        str | None, typer.Option(help="The same as a template (or @FILE).", rich_help_panel=_ROWS)
    ] = None
    embed: Annotated[
        bool,
        typer.Option("--embed", help="The vectors of the prompts instead of answers.", rich_help_panel=_ROWS),
    ] = False
    input_format: Annotated[
        Format | None,
        typer.Option(help="What all files are. Default: what their names say.", rich_help_panel=_INPUT),
    ] = None
    limit: Annotated[int | None, typer.Option(help="Only the first rows, so many.", rich_help_panel=_INPUT)] = None
    sample: Annotated[int | None, typer.Option(help="Only so many rows, drawn at random.", rich_help_panel=_INPUT)] = (
        None
    )
    sample_seed: Annotated[
        int | None, typer.Option(help="Another draw for another number. Default: 0.", rich_help_panel=_INPUT)
    ] = None
    select: Annotated[
        str | None, typer.Option(help="Only these columns of Parquet: a,b,c.", rich_help_panel=_INPUT)
    ] = None
    where: Annotated[
        str | None,
        typer.Option(help="Only rows of Parquet like this: \"lang = 'en' and n > 5\".", rich_help_panel=_INPUT),
    ] = None
    max_line_bytes: Annotated[
        int, typer.Option(min=1024, help="A row of more bytes is refused.", rich_help_panel=_INPUT)
    ] = MAX_LINE_BYTES
    on_bad_row: Annotated[
        OnBadRow | None,
        typer.Option(
            help="'skip': a bad row costs that row. 'fail': it fails the job before any work. "
            "Default: skip for records, fail for OpenAI lines.",
            rich_help_panel=_ROWS,
        ),
    ] = None
    model_alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name that rows may call the model by. May be repeated.", rich_help_panel=_ROWS),
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(help="A LoRA adapter: a folder of the workers, or a hub id.", rich_help_panel=_ROWS),
    ] = None
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = None
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.", rich_help_panel=_SAMPLING)] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=_SAMPLING)] = None
    min_p: Annotated[
        float | None, typer.Option(help="Keep tokens this fraction as likely as the best.", rich_help_panel=_SAMPLING)
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this string. May be repeated.", rich_help_panel=_SAMPLING)
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling noise.", rich_help_panel=_SAMPLING)] = None
    n: Annotated[int | None, typer.Option("--n", help="Answers to each row.", rich_help_panel=_SAMPLING)] = None
    best_of: Annotated[
        int | None, typer.Option(help="Generate so many, and keep the n likeliest.", rich_help_panel=_SAMPLING)
    ] = None
    beam_width: Annotated[
        int | None, typer.Option(help="Beam search with so many beams.", rich_help_panel=_SAMPLING)
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Against tokens that came already.", rich_help_panel=_SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, for each time they came.", rich_help_panel=_SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 against tokens of prompt and answer.", rich_help_panel=_SAMPLING)
    ] = None
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, with so many alternatives.", rich_help_panel=_SAMPLING)
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end token.", rich_help_panel=_SAMPLING)
    ] = False
    pooling: Annotated[str | None, typer.Option(help="mean, cls or last.", rich_help_panel=_EMBEDDING)] = None
    normalize: Annotated[
        bool | None, typer.Option(help="Vectors of length 1, or as they come.", rich_help_panel=_EMBEDDING)
    ] = None
    dimensions: Annotated[
        int | None, typer.Option(help="Keep so many leading dimensions.", rich_help_panel=_EMBEDDING)
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut longer texts to so many tokens; -1: the model's limit.", rich_help_panel=_EMBEDDING),
    ] = None
    encoding_format: Annotated[
        str | None, typer.Option(help="float, or base64 of float32.", rich_help_panel=_EMBEDDING)
    ] = None
    json_schema: Annotated[
        Path | None, typer.Option(help="Answers are JSON of the schema in this file.", rich_help_panel=_STRUCTURE)
    ] = None
    json_object: Annotated[
        bool, typer.Option("--json-object", help="Answers are JSON objects.", rich_help_panel=_STRUCTURE)
    ] = False
    regex: Annotated[str | None, typer.Option(help="Answers match this.", rich_help_panel=_STRUCTURE)] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="Answers are one of these. May be repeated.", rich_help_panel=_STRUCTURE)
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(help="Answers follow the Lark or GBNF grammar here.", rich_help_panel=_STRUCTURE)
    ] = None

    @property
    def rows(self) -> OpenAIRows | RecordRows:
        given = [name for name in PROMPT_WAYS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{flag(given[0])} and {flag(given[1])} exclude each other.", hint="Give one of them.")
        makes_prompt = given in (["prompt_column"], ["template"])
        for name in ("system", "system_template", "embed"):
            if getattr(self, name) and not makes_prompt:
                raise UsageError(
                    f"{flag(name)} goes with --prompt-column or --template.",
                    hint="Messages and OpenAI lines say it themselves.",
                )
        if not given:
            return OpenAIRows()
        return _validated(
            RecordRows,
            prompt_column=self.prompt_column,
            messages_column=self.messages_column,
            template=_text_or_file(self.template),
            messages_template=_text_or_file(self.messages_template),
            system=self.system,
            system_template=_text_or_file(self.system_template),
            embed=self.embed,
        )

    @property
    def input_options(self) -> InputOptions:
        if self.sample_seed is not None and self.sample is None:
            raise UsageError("--sample-seed goes with --sample.", hint="Say how many rows to draw.")
        if self.sample is not None and self.limit is not None:
            raise UsageError("--limit and --sample exclude each other.", hint="Give one of them.")
        for name in ("limit", "sample"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise UsageError(f"{flag(name)}: {count} rows are none.", hint="Give 1 or more.")
        return InputOptions(
            format=self.input_format,
            limit=self.limit,
            sample=self.sample,
            sample_seed=self.sample_seed or 0,
            where=self.where,
            columns=None if self.select is None else tuple(name.strip() for name in self.select.split(",")),
        )

    @property
    def embedding(self) -> Pooling:
        return _validated(
            Pooling,
            pooling=self.pooling,
            normalize=self.normalize,
            dimensions=self.dimensions,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            encoding_format=self.encoding_format,
        )

    @property
    def sampling(self) -> Sampling:
        return _validated(
            Sampling,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=tuple(self.stop) if self.stop else None,
            seed=self.seed,
            n=self.n,
            best_of=self.best_of,
            beam_width=self.beam_width,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logprobs=self.logprobs,
            structured_output=self._structured_output(),
            ignore_eos=self.ignore_eos or None,
        )

    def _structured_output(self) -> StructuredOutput | None:
        given = {
            "json": self.json_schema and _json_file(self.json_schema),
            "json_object": self.json_object or None,
            "regex": self.regex,
            "choice": tuple(self.choice) if self.choice else None,
            "grammar": self.grammar and _text_file(self.grammar),
        }
        set_ones = {name: value for name, value in given.items() if value is not None}
        return _validated(StructuredOutput, **set_ones) if set_ones else None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a worker runs its model. The engine checks them; None leaves the choice to it."""

    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)] = "auto"
    quantize: Annotated[
        str | None,
        typer.Option(help="The linears in fewer bits: int8 on a CPU, fp8 or int4 on a GPU.", rich_help_panel=_ENGINE),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="auto, bfloat16, float16; int8 on a CPU, fp8 on a GPU: twice the tokens.", rich_help_panel=_ENGINE
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)] = "auto"
    max_num_seqs: Annotated[int | None, typer.Option(help="Most rows in one step.", rich_help_panel=_ENGINE)] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in one step.", rich_help_panel=_ENGINE)
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer together.", rich_help_panel=_ENGINE)
    ] = None
    model_impl: Annotated[
        str | None,
        typer.Option(help="auto; native: our code; transformers: Transformers' own.", rich_help_panel=_ENGINE),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=_ENGINE)
    ] = False
    preallocate_kv: Annotated[
        bool, typer.Option("--preallocate-kv", help="Take all memory of the KV cache at once.", rich_help_panel=_ENGINE)
    ] = False
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory to use.", rich_help_panel=_ENGINE)
    ] = None
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Launch a step before the tokens of the last one are on the host. Default: with a GPU.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Replay no CUDA graphs.", rich_help_panel=_ENGINE)
    ] = False
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.", rich_help_panel=_ENGINE)] = None
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Compute what prompts begin with alike once. Default: yes.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        typer.Option(
            help="prefix: prompts that begin alike together, long answers early; fcfs: as they come. Default: prefix.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    max_loras: Annotated[
        int | None, typer.Option(help="Most LoRA adapters in memory; 0 serves none.", rich_help_panel=_ENGINE)
    ] = None
    max_lora_rank: Annotated[int | None, typer.Option(help="Highest rank of an adapter.", rich_help_panel=_ENGINE)] = (
        None
    )
    swap_space: Annotated[
        int | None, typer.Option(help="Bytes of host memory for preempted rows.", rich_help_panel=_ENGINE)
    ] = None
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of a step.", rich_help_panel=_ENGINE)] = None

    @property
    def given(self) -> dict[str, Any]:
        """The options that were set, by the engine's own names."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def argv(self) -> list[str]:
        """The same for the command line of a worker."""
        argv: list[str] = []
        for name, value in self.given.items():
            argv += [flag(f"no_{name}" if value is False else name), *([] if isinstance(value, bool) else [str(value)])]
        return argv


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text_or_file(value: str | None) -> str | None:
    """What an option says: itself, or with `@` before it the name of a file that does."""
    return _text_file(Path(value[1:])) if value is not None and value.startswith("@") else value


def _text_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}).") from error


def _json_file(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(_text_file(path))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error}).") from error
    if not isinstance(schema, dict):
        raise UsageError(f"{path} holds no JSON schema: that is an object.")
    return schema


def _validated(kind: type[T], **values: Any) -> T:
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"--{str(part).replace('_', '-')}: " for part in first["loc"][:1])
        raise UsageError(f"{where}{first['msg'].removeprefix('Value error, ')}") from error
