"""One owner for a state folder: two servers on the same data would destroy it."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from jobs.errors import UsageError

_LOCK = "lock"


@contextmanager
def alone_in(folder: Path, *, fresh: bool = False) -> Iterator[None]:
    """Hold a state folder until the block ends, or the process does, however. With `fresh` it is empty then.

    A folder in which nothing was put is removed again. Raises UsageError (`already_running`) while another process has
    it, and leaves that one's files alone.
    """
    with _locked(folder):
        if fresh:
            for path in folder.iterdir():
                if path.name != _LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                if os.listdir(folder) == [_LOCK]:
                    shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    while True:
        with _opened(folder) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"Another pagemill is at work in {folder}.",
                    code="already_running",
                    hint="Wait until it has ended, or stop it.",
                ) from error
            if not _is_there(file, folder):
                continue  # the one before removed it between the two
            yield
            return


def _opened(folder: Path) -> BinaryIO:
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / _LOCK).open("ab")
        except FileNotFoundError:
            continue  # removed between the two
        except OSError as error:
            raise UsageError(f"The folder {folder}, for what a run needs, cannot be made: {error.strerror}.") from error


def _is_there(file: BinaryIO, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(folder / _LOCK))
    except FileNotFoundError:
        return False
