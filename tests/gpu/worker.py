"""One section of the check in a process of its own: an illegal access ends the process, not the check.

Started by `tests.gpu.check` with one JSON argument, it writes a JSON object a line to the pipe it was given: the names
of its cases, the name of each as it starts, and each outcome. It ends early where the device no longer works.
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time
from typing import Any, TextIO

import torch

from tests.gpu.cases import Case, Setting, attempt

# Modules with a function `cases`, each imported in its own process: kernels are checked without Transformers.
SECTIONS = {
    "kernels": "tests.gpu.kernel_cases",
    "engine": "tests.gpu.engine_cases",
    "kernel speed": "tests.gpu.kernel_speed",
    "engine speed": "tests.gpu.engine_speed",
}


def run(
    section: str,
    setting: Setting,
    done: Sequence[str],
    match: Sequence[str],
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Run the cases of a section that are not `done`, and report them until the deadline.

    With `match`, those whose name contains one of these.
    """
    listed: list[Case] = []

    def collect() -> None:
        found: list[Case] = importlib.import_module(SECTIONS[section]).cases(setting)
        listed.extend(case for case in found if not match or any(part in case.name for part in match))

    collected = attempt(section, Case(f"{section}: its cases", collect), setting)
    if collected.status == "wrong":
        report(collected.as_dict())
        return
    report({"cases": [case.name for case in listed]})
    for case in listed:
        if case.name in done:
            continue
        if time() >= setting.deadline:
            return
        report({"starts": case.name})
        report(attempt(section, case, setting).as_dict())
        if (broken := _broken(setting.device)) is not None:
            report({"broken": broken})
            return


def _broken(device: torch.device) -> str | None:
    """Why nothing runs on the device any more; None if it does. After an illegal access only a new process helps."""
    try:
        return None if int(torch.ones(3, device=device).sum()) == 3 else "it does not add up"
    except RuntimeError as error:
        return str(error).splitlines()[0]


def _complete_interpreter() -> None:
    """Give Triton's interpreter the instructions of inline assembly that kernels have."""
    from triton.runtime.interpreter import InterpreterBuilder

    from tests.kernels.triton import ptx

    InterpreterBuilder.create_inline_asm = ptx.create_inline_asm


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")
    pipe: TextIO = os.fdopen(order["pipe"], "w", buffering=1)
    setting = Setting(torch.device(order["device"]), order["deadline"], Path(order["folder"]))
    if setting.interpreted:
        _complete_interpreter()

    def report(line: dict[str, Any]) -> None:
        pipe.write(json.dumps(line) + "\n")

    run(order["section"], setting, order["done"], order["match"], report)


if __name__ == "__main__":
    main()
