"""A state folder has one owner, which may end in any way."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.errors import UsageError
from jobs.local.alone import alone_in

HOLD = """
import sys
from pathlib import Path
from jobs.local.alone import alone_in

with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_owner_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    folder = tmp_path / "out.jsonl.pagemill"
    with alone_in(folder):
        (folder / "run.json").write_text("{}")
        for fresh in (False, True):
            with (
                pytest.raises(UsageError, match="Another pagemill is at work in") as caught,
                alone_in(folder, fresh=fresh),
            ):
                pass
            assert caught.value.code == "already_running"
        assert (folder / "run.json").exists()
    with alone_in(folder):
        assert (folder / "run.json").exists()


def test_a_fresh_start_finds_the_folder_empty(tmp_path: Path) -> None:
    (tmp_path / "store" / "jobs").mkdir(parents=True)
    (tmp_path / "run.json").touch()
    with alone_in(tmp_path, fresh=True):
        assert os.listdir(tmp_path) == ["lock"]


def test_a_folder_that_nothing_was_put_into_is_gone_after(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(UsageError), alone_in(folder):
        raise UsageError("The input is missing.")
    assert not folder.exists()


def test_an_owner_that_removes_its_folder_leaves_none(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    with alone_in(folder):
        shutil.rmtree(folder)
    assert not folder.exists()
    with alone_in(folder):
        pass


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made: Not a directory"), alone_in(tmp_path / "file" / "b"):
        pass


def test_the_folder_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(UsageError), alone_in(tmp_path):
            pass
        owner.send_signal(signal.SIGKILL)
    with alone_in(tmp_path):
        pass
