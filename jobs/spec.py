"""What a job is: one frozen value, written to storage as `job.json` before anything else happens.

Whatever the job does later follows from this value and the input's bytes, so that a planner that crashed can be run
again and a ledger that was lost can be rebuilt.
"""

import hashlib
import secrets
import time
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from jobs.errors import UnreadableJob
from jobs.layout import JobLayout
from jobs.output import Output
from jobs.pooling import Pooling
from jobs.sampling import Sampling
from jobs.templates import check_template

OnBadRow = Literal["fail", "skip"]
JOB_ID_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,63}$"
Dedupe = Literal["off", "exact", "all"]
"""Which identical rows of a job a worker asks once: none; those that would get the same answer anyway, being greedy,
seeded or embeddings; or all, and then sampled ones share one answer."""
Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
JobId = Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]

Format = Literal["jsonl", "csv", "tsv", "parquet"]
Compression = Literal["gzip", "zstd", "bz2"]

PROMPT_WAYS = ("prompt_column", "messages_column", "template", "messages_template")
"""What may say how a record becomes a request; exactly one does."""
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_PRIORITY = 1000
DEFAULT_TENANT = "default"


class InputFile(BaseModel):
    """One file of the input, pinned: a job fails rather than mix the rows of two versions.

    `name` is what the submitter calls it. `rows` is known where the file says it, which Parquet does.
    """

    model_config = ConfigDict(frozen=True)

    name: str = ""
    url: str
    size: int
    etag: str
    compression: Compression | None = None
    rows: int | None = None

    @property
    def label(self) -> str:
        """What errors call it."""
        return self.name or self.url


class Input(BaseModel):
    """What the rows are: of the files, in order and all of one format, those that are asked for.

    `limit` keeps the first rows; `sample` keeps so many, drawn by `sample_seed`, in their order. Both count bad rows
    too. Parquet has more: `where` keeps the rows for which it holds, before they are counted, and `columns` are what
    is kept of them. `arrow_schema` has the types of all columns, in all files; with `regroup`, row groups are so large
    that the planner cuts them first.
    """

    model_config = ConfigDict(frozen=True)

    files: tuple[InputFile, ...] = Field(min_length=1)
    format: Format = "jsonl"
    limit: int | None = Field(default=None, ge=1)
    sample: int | None = Field(default=None, ge=1)
    sample_seed: int = Field(default=0, ge=0)
    where: str | None = None
    columns: tuple[str, ...] | None = None
    arrow_schema: str | None = None
    regroup: bool = False

    @model_validator(mode="after")
    def _one_choice(self) -> "Input":
        if self.limit is not None and self.sample is not None:
            raise ValueError("limit and sample exclude each other")
        return self

    @property
    def size(self) -> int:
        """The bytes of all files, as they are stored."""
        return sum(file.size for file in self.files)

    @property
    def is_direct(self) -> bool:
        """Whether shards are parts of the files as they are, and no sample of their rows."""
        return self.sample is None and not self.needs_copy

    @property
    def needs_copy(self) -> bool:
        """Whether there is a file that cannot be read from any position."""
        return self.regroup or self.format in ("csv", "tsv") or any(file.compression for file in self.files)


class OpenAIRows(BaseModel):
    """Each line is an OpenAI batch request for one endpoint: custom_id, method, url, body."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["openai"] = "openai"


TemplateText = Annotated[str, AfterValidator(check_template)]


class RecordRows(BaseModel):
    """Each row is an object; one column, or a template of them, makes the prompt or the messages. All pass through.

    `template` makes the prompt, `messages_template` the messages as JSON, and `system_template` the system message.
    With `embed` the prompt is not answered: its vector is wanted.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["record"] = "record"
    prompt_column: str | None = None
    messages_column: str | None = None
    template: TemplateText | None = None
    messages_template: TemplateText | None = None
    system: str | None = None
    system_template: TemplateText | None = None
    embed: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> "RecordRows":
        ways = {name: getattr(self, name) for name in PROMPT_WAYS}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(PROMPT_WAYS)} is needed")
        makes_prompt = given[0] in ("prompt_column", "template")
        if self.system is not None and self.system_template is not None:
            raise ValueError("system and system_template exclude each other")
        has_system = self.system is not None or self.system_template is not None
        if has_system and not makes_prompt:
            raise ValueError("a system message goes with a prompt; messages carry their own")
        if self.embed and (has_system or not makes_prompt):
            raise ValueError("embed goes with a prompt, and with no system message")
        return self


RowShape = Annotated[OpenAIRows | RecordRows, Field(discriminator="kind")]


class Parent(BaseModel):
    """The job whose failed rows a job runs again; what it answered is kept. Both have the same input and shards.

    `origin` is the first of the line: where that is a retry itself, what it retries, and so on.
    """

    model_config = ConfigDict(frozen=True)

    job_id: JobId
    storage_url: str
    origin: JobId

    @property
    def layout(self) -> JobLayout:
        return JobLayout(self.storage_url, self.job_id)


class Terms(BaseModel):
    """How a job runs beside others, and what is done with rows that are slow or alike.

    Of jobs of one model, those of the highest priority run first; within it, tenants and their jobs share by weight.
    At `expires_at` (Unix seconds) the job ends with what is done. A row that the engine has had for `max_row_seconds`
    ends as an error.
    """

    model_config = ConfigDict(frozen=True)

    tenant: Tenant = DEFAULT_TENANT
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    weight: float = Field(default=1.0, ge=1e-3, le=1e3)
    expires_at: int | None = None
    max_row_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    dedupe: Dedupe = "off"


class JobSpec(Terms):
    """One submitted input and how to run it."""

    model_config = ConfigDict(frozen=True)

    id: JobId
    created_at: int
    storage_url: str
    """Where the job's own objects lie; see `layout`."""
    model: str
    model_aliases: tuple[str, ...] = ()
    input: Input
    output: Output = Output()
    output_url: str
    error_url: str
    rows: RowShape
    sampling: Sampling = Sampling()
    pooling: Pooling = Pooling()
    lora: str | None = None
    on_bad_row: OnBadRow
    max_line_bytes: int = Field(default=MAX_LINE_BYTES, ge=1024)
    max_tries: int = Field(default=4, ge=1)
    parent: Parent | None = None

    @property
    def layout(self) -> JobLayout:
        return JobLayout(self.storage_url, self.id)

    @property
    def terms(self) -> Terms:
        return Terms(**self.model_dump(include=set(Terms.model_fields)))

    @property
    def origin(self) -> str:
        """The job from whose id the ids and the seeds of the rows follow: a row that is tried again is the same row."""
        return self.parent.origin if self.parent else self.id

    def asks_the_same(self, other: "JobSpec") -> bool:
        """Whether both are submissions of one job: all is the same but the input's place and when each was made."""
        return self._request() == other._request()

    def _request(self) -> "JobSpec":
        return self.model_copy(update={"created_at": 0, "expires_at": None, "input": None})

    def accepts_model(self, name: str) -> bool:
        return name == self.model or name in self.model_aliases

    @property
    def fingerprint(self) -> str:
        """A digest of all that decides the result: two specs with the same one ask for the same work."""
        body = self.model_dump_json(exclude={"id", "created_at", "tenant", "priority", "weight", "expires_at"})
        return hashlib.sha256(body.encode()).hexdigest()[:32]


def load_spec(data: str | bytes, where: str) -> JobSpec:
    """The spec that was written as JSON. Raises UnreadableJob, which says `where` it stands.

    A field that is not known here makes it unreadable too: what it asks for would be left out.
    """
    try:
        return JobSpec.model_validate_json(data, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        raise UnreadableJob(
            f"{where} is no job spec that this version can read: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            hint="A newer version may have submitted it: use that one here too.",
        ) from error


def new_job_id() -> str:
    """An id that sorts by time and is never repeated: `batch_`, 11 hex digits of milliseconds, 80 random bits."""
    return f"batch_{time.time_ns() // 1_000_000:011x}{secrets.token_hex(10)}"


def job_id_of(tenant: str, idempotency_key: str) -> str:
    """The id of the one job that a tenant submits under this key, however often."""
    digest = hashlib.sha256(f"{tenant}\0{idempotency_key}".encode()).hexdigest()
    return f"batch_k{digest[:40]}"


def model_key(model: str) -> str:
    """The short name of a model in queue and key names, where its own could hold any character."""
    return hashlib.sha256(model.encode()).hexdigest()[:12]
