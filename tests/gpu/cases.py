"""What a section of the check consists of: cases by name, and what came of each."""

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, time
from typing import Any, Literal, NamedTuple

import torch

_ROOT = Path(__file__).parents[2]
# A table of them has to be read at a glance; all of it is in the JSON file.
_LONGEST_DETAIL = 300
_LONGEST_TRACEBACK = 6000

Status = Literal["ok", "wrong", "left out"]


class Setting(NamedTuple):
    """Where cases run, until when (seconds since 1970), and a folder for models that they write."""

    device: torch.device
    deadline: float
    folder: Path

    @property
    def interpreted(self) -> bool:
        """Whether Triton interprets on a CPU: bfloat16 products are wrong there, and everything takes a hundred times
        as long."""
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that models have here."""
        return torch.float16 if self.interpreted else torch.bfloat16

    @property
    def seconds_left(self) -> float:
        return self.deadline - time()


@dataclass(frozen=True)
class Found:
    """What a case says beside that nothing is wrong: `figures` by name with its unit, and whether a bar is met."""

    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    bar: str = ""
    met: bool | None = None


class LeftOut(Exception):
    """Raised by a case that cannot be run here; its message says why."""


class Case(NamedTuple):
    """`name` is that of a group, a colon, and what tells it from others of the group."""

    name: str
    run: Callable[[], Found | None]


@dataclass(frozen=True)
class Outcome:
    """One case's result, as it is sent from process to process and written as JSON."""

    section: str
    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    bar: str = ""
    met: bool | None = None
    traceback: str = ""

    @property
    def group(self) -> str:
        return self.name.split(":")[0]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def attempt(section: str, case: Case, setting: Setting) -> Outcome:
    """Run a case; whatever it raises is its outcome."""
    began = perf_counter()
    try:
        found = case.run() or Found()
        if setting.device.type == "cuda":
            # What a kernel did wrong may only show when somebody waits for it.
            torch.cuda.synchronize()
    except LeftOut as reason:
        return Outcome(section, case.name, "left out", str(reason), perf_counter() - began)
    except Exception as error:  # noqa: BLE001
        # The check exists to find out what is raised, and the other cases say more.
        text = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
        return Outcome(section, case.name, "wrong", _brief(error), perf_counter() - began, traceback=text)
    seconds = perf_counter() - began
    return Outcome(section, case.name, "ok", found.detail, seconds, found.figures, found.bar, found.met)


def _brief(error: Exception) -> str:
    """What was raised, and by which line of this repository."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [one for one in stack if Path(one.filename).is_relative_to(_ROOT) and not _is_aside(one.filename)]
    place = f"{Path(frames[-1].filename).relative_to(_ROOT)}:{frames[-1].lineno}: " if frames else ""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{place}{said}"[:_LONGEST_DETAIL]


def _is_aside(file: str) -> bool:
    return "site-packages" in file or file == __file__


def close(got: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float = 0.0) -> None:
    """Raise `AssertionError` with the greatest difference if two tensors differ by more than rounding."""
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise `AssertionError` if any number, shape or dtype differs."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
