"""Failpoints fail where they are told to, and nowhere else."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.errors import ServiceUnreachable, UsageError
from jobs.failpoints import POINTS, VARIABLE, Armed, Failpoints, parse

ROOT = Path(__file__).parents[2]
CALL = re.compile(r'\bfailpoint\("([^"]+)"\)')


def test_each_point_stands_at_one_place_of_the_code() -> None:
    sources = [path for room in ("jobs", "workers") for path in (ROOT / room).rglob("*.py")]
    calls = [point for path in sources for point in CALL.findall(path.read_text())]
    assert sorted(calls) == sorted(POINTS)


def test_a_point_fires_once_at_the_pass_that_was_named() -> None:
    points = Failpoints({"row.asked": Armed("raise", 3)})
    points.hit("row.asked")
    points.hit("lease.taken")
    points.hit("row.asked")
    with pytest.raises(ServiceUnreachable):
        points.hit("row.asked")
    points.hit("row.asked")


def test_what_the_variable_says_is_read() -> None:
    assert parse(" segment.put:kill@2, plan.added:raise,") == {
        "segment.put": Armed("kill", 2),
        "plan.added": Armed("raise", 1),
    }
    assert parse("") == {}


@pytest.mark.parametrize("text", ["segment.pot:kill", "segment.put:explode", "segment.put", "segment.put:kill@two"])
def test_a_failpoint_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        parse(text)


@pytest.mark.parametrize(("armed", "exit_code"), [("lease.taken:kill", -signal.SIGKILL), ("plan.added:kill", 0)])
def test_the_environment_arms_the_points_of_a_process(armed: str, exit_code: int) -> None:
    code = "from jobs.failpoints import failpoint; failpoint('lease.taken')"
    assert subprocess.run([sys.executable, "-c", code], env={VARIABLE: armed}, cwd=ROOT).returncode == exit_code
