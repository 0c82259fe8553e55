"""Child processes: started again when they die, ended when their command ends, and gone if it is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import EXIT_USAGE, PagemillError, ServiceUnreachable, UsageError
from jobs.local import supervisor as supervisor_module
from jobs.local.supervisor import Child, Supervisor

WAIT_S = 20


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_MAX_RESTART_DELAY_S", 0.02)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "log", grace=WAIT_S) as supervisor:
        yield supervisor


def child(name: str, *lines: str, **fields: Any) -> Child:
    """A process that runs these lines of Python and then waits for a signal."""
    program = "\n".join(["import os, signal, sys, time", *lines, "print('up', flush=True)", "signal.pause()"])
    return Child(name, [sys.executable, "-u", "-c", program], **fields)


def wait_until(met: Callable[[], Any]) -> Any:
    """Polls what other processes do, which has no event to wait for."""
    deadline = time.monotonic() + WAIT_S
    while not (found := met()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def is_up(supervisor: Supervisor, name: str) -> bool:
    log = supervisor.log_path(name)
    return log.exists() and "up" in log.read_text()


def test_a_killed_child_is_started_again(supervisor: Supervisor) -> None:
    supervisor.start(child("c", "print(os.environ['NAME'])", env={"NAME": "value"}))
    first = wait_until(lambda: supervisor.pid("c"))
    os.kill(first, signal.SIGKILL)
    second = wait_until(lambda: (pid := supervisor.pid("c")) != first and pid)
    assert os.path.exists(f"/proc/{second}")
    wait_until(lambda: supervisor.log_path("c").read_text().count("up"))
    assert "value" in supervisor.log_path("c").read_text()
    assert not supervisor.failed.is_set()


def test_a_child_is_started_once_it_is_ready(supervisor: Supervisor, tmp_path: Path) -> None:
    flag = tmp_path / "ready"
    supervisor.start(child("c", f"open({str(flag)!r}, 'w')", ready=flag.exists))
    assert flag.exists()


def test_a_usage_error_is_not_tried_again_and_its_words_are_kept(supervisor: Supervisor) -> None:
    words = "error: There is no model 'x'.\nhint: Install it."
    supervisor.start(child("c", f"print({words!r}); sys.exit({EXIT_USAGE})"))
    assert supervisor.failed.wait(WAIT_S)
    assert isinstance(supervisor.failure, UsageError)
    assert supervisor.failure.message == "c cannot run: There is no model 'x'."
    assert supervisor.failure.hint == "Install it."
    assert supervisor.log_path("c").read_text().count("error:") == 1


def test_a_child_that_dies_young_too_often_has_failed(supervisor: Supervisor) -> None:
    supervisor.start(child("c", "print('out of luck'); sys.exit(1)"))
    assert supervisor.failed.wait(WAIT_S)
    assert supervisor.failure is not None
    assert not isinstance(supervisor.failure, UsageError)
    assert "out of luck" in supervisor.failure.message
    assert supervisor.log_path("c").read_text().count("out of luck") == 5


def test_a_child_that_says_nothing_has_failed_all_the_same(supervisor: Supervisor) -> None:
    supervisor.start(child("c", f"sys.exit({EXIT_USAGE})"))
    assert supervisor.failed.wait(WAIT_S)
    assert "it said nothing" in str(supervisor.failure)


def test_a_program_that_is_not_there_has_failed(supervisor: Supervisor) -> None:
    supervisor.start(Child("c", ["/nowhere/at-all"]))
    assert supervisor.failed.wait(WAIT_S)
    assert "/nowhere/at-all" in str(supervisor.failure)


def test_a_child_that_fails_before_it_is_ready_raises(supervisor: Supervisor) -> None:
    with pytest.raises(PagemillError, match="no such port"):
        supervisor.start(child("c", f"print('no such port'); sys.exit({EXIT_USAGE})", ready=lambda: False))


def test_a_child_that_is_never_ready_is_unreachable(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_READY_S", 0.2)
    with pytest.raises(ServiceUnreachable, match="c did not answer") as caught:
        supervisor.start(child("c", ready=lambda: False))
    assert str(supervisor.log_path("c")) in caught.value.hint


def test_a_stop_ends_all_the_last_started_first(tmp_path: Path) -> None:
    order = tmp_path / "order"
    say = f"signal.signal(signal.SIGTERM, lambda *_: (open({str(order)!r}, 'a').write(name + ' '), sys.exit(0)))"
    supervisor = Supervisor(tmp_path / "log", grace=WAIT_S)
    for name in ("a", "b", "c"):
        supervisor.start(child(name, f"name = {name!r}", say))
        wait_until(lambda name=name: is_up(supervisor, name))
    pids = [supervisor.pid(name) for name in ("a", "b", "c")]
    supervisor.stop()
    assert order.read_text() == "c b a "
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not supervisor.failed.is_set()


def test_a_child_that_does_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "log", grace=0.2)
    supervisor.start(child("c", "signal.signal(signal.SIGTERM, lambda *_: print('no'))", "while True: time.sleep(1)"))
    pid = wait_until(lambda: supervisor.pid("c"))
    supervisor.stop()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_stop_between_two_lives_starts_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_RESTART_DELAY_S", 60.0)
    monkeypatch.setattr(supervisor_module, "_MAX_RESTART_DELAY_S", 60.0)
    supervisor = Supervisor(tmp_path / "log", grace=WAIT_S)
    supervisor.start(child("c"))
    pid = wait_until(lambda: is_up(supervisor, "c") and supervisor.pid("c"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    stop = threading.Thread(target=supervisor.stop)
    stop.start()
    stop.join(WAIT_S)
    assert not stop.is_alive()
    assert supervisor.log_path("c").read_text().count("up") == 1


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from jobs.local.supervisor import Child, Supervisor
supervisor = Supervisor(Path({str(tmp_path)!r}), grace=1)
supervisor.start(Child("c", [sys.executable, "-c", "import signal; signal.pause()"]))
while not (pid := supervisor.pid("c")):
    time.sleep(0.01)
print(pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        parent.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
