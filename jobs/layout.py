"""Where the objects of a job lie, below the storage URL that the job was submitted to.

    jobs/<id>/job.json                                 the spec
    jobs/<id>/plan.jsonl                               the shards
    jobs/<id>/schema.arrow                             the columns of a Parquet output, put before the plan
    jobs/<id>/in/000000.csv.gz                         the input's files, where workers could not read the originals
    jobs/<id>/in/<random>.jsonl                        their rows, where those cannot be read from the files in parts
    jobs/<id>/source.json                              what the shards are parts of, where it is not just the input
    jobs/<id>/att/<shard>/<fence>-<attempt>.jsonl      the segment of one attempt, and its errors beside it; its
                                                       suffix is the output's, its errors are JSON lines
    jobs/<id>/att/<shard>/<fence>-<attempt>.json       its record, put after both: the segment is whole
    jobs/<id>/orders/                                  what its owner ordered since: see orders.py
    jobs/<id>/remaining.jsonl                          what a cancelled job has not done, ready to submit; .parquet
                                                       where the input is
    jobs/<id>/failed.json                              why it failed, where it did
    jobs/<id>/manifest.json                            written last: what the result consists of

Keys of segments are never used again: the fence only grows, and the attempt is 128 random bits should a ledger that
was rolled back hand out a fence twice.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_ATTEMPT = re.compile(r".*/att/(\d{6,})/(\d{10,})-(\w+)(\..+)")
_RECORD_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class JobLayout:
    """The URLs of one job's objects."""

    storage_url: str
    job_id: str
    submission: str = ""
    """What the names of the input's files begin with, where the same job may be submitted again."""

    @property
    def root(self) -> str:
        return f"{self.storage_url}/jobs/{self.job_id}"

    @property
    def spec(self) -> str:
        return f"{self.root}/job.json"

    @property
    def plan(self) -> str:
        return f"{self.root}/plan.jsonl"

    @property
    def schema(self) -> str:
        return f"{self.root}/schema.arrow"

    def input(self, place: int, suffix: str) -> str:
        """File number `place` of the input."""
        return f"{self.inputs}{self.submission}{place:06}{suffix}"

    @property
    def inputs(self) -> str:
        """What the URLs of the job's copies of its input start with."""
        return f"{self.root}/in/"

    def copy_of_input(self, name: str, suffix: str) -> str:
        """A copy of the input's rows; `name` is random, so that planners at work at once do not share one."""
        return f"{self.inputs}{name}{suffix}"

    @property
    def source(self) -> str:
        return f"{self.root}/source.json"

    @property
    def remaining(self) -> str:
        return f"{self.root}/remaining.jsonl"

    @property
    def remaining_table(self) -> str:
        """The same of an input of Parquet."""
        return f"{self.root}/remaining.parquet"

    @property
    def failure(self) -> str:
        """Why the job failed, where it did: a job that has this has no manifest."""
        return f"{self.root}/failed.json"

    @property
    def manifest(self) -> str:
        return f"{self.root}/manifest.json"

    @property
    def orders(self) -> str:
        """What the URLs of the owner's orders start with."""
        return f"{self.root}/orders/"

    def output(self, suffix: str) -> str:
        """The result, where the submitter named no other place."""
        return f"{self.root}/output{suffix}"

    def segment(self, shard: int, fence: int, attempt: str, part: str = "", suffix: str = ".jsonl") -> str:
        """The object of one attempt; `part` tells its error lines (`.errors`) from its output."""
        return f"{self.attempts}{shard:06}/{fence:010}-{attempt}{part}{suffix}"

    @property
    def attempts(self) -> str:
        """What the URLs of all attempts' objects start with."""
        return f"{self.root}/att/"

    def record(self, shard: int, fence: int, attempt: str) -> str:
        """The commit record of one attempt as it was before the commit."""
        return f"{self.attempts}{shard:06}/{fence:010}-{attempt}{_RECORD_SUFFIX}"


class AttemptObject(NamedTuple):
    """What the URL of an attempt's object says."""

    shard: int
    fence: int
    attempt: str
    is_record: bool


def attempt_object(url: str) -> AttemptObject | None:
    """The attempt that an object below `JobLayout.attempts` is of; None for anything else."""
    found = _ATTEMPT.fullmatch(url)
    if found is None:
        return None
    shard, fence, attempt, suffix = found.groups()
    return AttemptObject(int(shard), int(fence), attempt, suffix == _RECORD_SUFFIX)


def jobs_prefix(storage_url: str) -> str:
    """What the URLs of all jobs' objects start with; a job's folder is named by its id."""
    return f"{storage_url}/jobs/"


def absolute_url(location: str) -> str:
    """A URL as it is, and a path as a `file://` URL without `..`: workers have another working directory."""
    return location if "://" in location else f"file://{Path(location).expanduser().resolve()}"
