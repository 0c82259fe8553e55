"""The engine in a process of its own: what it answers, and what its owner learns when either of them dies."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from engine import EngineConfig, EngineDied, ModelNotFound, SamplingParams
from tests.engine.toy import answer
from tests.engine.toy_process import ToyProcess

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
WAIT_S = 60


def started():
    process = ToyProcess(EngineConfig("toy"))
    process.start()
    yield process
    process.stop()


engine = pytest.fixture(started, name="engine")
# For tests that leave the process as they found it.
unharmed = pytest.fixture(started, name="unharmed", scope="module")


def test_requests_from_many_threads_are_answered_and_bad_ones_carry_their_error(unharmed):
    assert unharmed.alive
    before = unharmed.stats()
    answers = {}

    def ask(thread):
        futures = {n: unharmed.submit([thread, n], GREEDY) for n in range(20)}
        answers[thread] = {n: future.result(WAIT_S) for n, future in futures.items()}

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    bad = unharmed.submit([9999], GREEDY)
    long = unharmed.submit([1] * 4000, GREEDY)
    for thread in threads:
        thread.join()
    for thread, outputs in answers.items():
        for n, output in outputs.items():
            assert list(output.outputs[0].token_ids) == answer([thread, n], 8)
    assert bad.result(WAIT_S).error.field == "prompt"
    assert long.result(WAIT_S).error.code == "context_length_exceeded"
    after = unharmed.stats()
    assert after.prompt_tokens - before.prompt_tokens == 160
    assert after.steps > before.steps
    assert (after.running, after.waiting) == (0, 0)


def test_an_aborted_request_gives_what_it_has(unharmed):
    future = unharmed.submit([1], ENDLESS)
    assert unharmed.submit([2], GREEDY).result(WAIT_S).error is None
    unharmed.abort(future)
    output = future.result(WAIT_S)
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 3000
    unharmed.abort(future)
    assert unharmed.submit([2], GREEDY).result(WAIT_S).error is None


def test_what_cannot_be_sent_raises_to_its_sender_and_harms_nobody(unharmed):
    with pytest.raises(TypeError, match="pickle"):
        unharmed.submit((n for n in range(3)), GREEDY)
    assert unharmed.submit([2], GREEDY).result(WAIT_S).error is None


def test_a_killed_engine_fails_its_futures_and_says_by_which_signal(engine):
    futures = [engine.submit([n], ENDLESS) for n in range(10)]
    os.kill(engine.pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(EngineDied, match="SIGKILL"):
            future.result(WAIT_S)
    assert engine.died.wait(WAIT_S)
    assert not engine.alive
    with pytest.raises(EngineDied, match="not running"):
        engine.submit([1], GREEDY).result(0)


OWNER = """
import sys, threading
from engine import EngineConfig, EngineDied, SamplingParams
from tests.engine.toy_process import CRASH, HANG, ToyProcess
process = ToyProcess(EngineConfig("toy"))
process.start()
"""


def test_a_crash_in_a_step_leaves_a_traceback_on_stderr_and_an_exit_code():
    script = """
other = process.submit([1], SamplingParams(max_tokens=3000, ignore_eos=True))
crash = process.submit(CRASH, SamplingParams())
for future in (other, crash):
    try:
        future.result(60)
    except EngineDied as error:
        print(error)
"""
    owner = subprocess.run([sys.executable, "-c", OWNER + script], capture_output=True, text=True, check=True)
    assert owner.stdout == 2 * "The engine process ended with exit code 1 with the request in flight.\n"
    assert "noise of a library" in owner.stderr, "the child's stdout is not its owner's"
    assert "Traceback" in owner.stderr
    assert "the toy was told to crash" in owner.stderr


def test_termination_signals_are_the_owners_business(unharmed):
    os.kill(unharmed.pid, signal.SIGTERM)
    os.kill(unharmed.pid, signal.SIGINT)
    assert unharmed.submit([2], GREEDY).result(WAIT_S).error is None


def test_termination_signals_during_the_start_do_not_kill_the_engine():
    process = ToyProcess(EngineConfig("toy"))
    starting = threading.Thread(target=process.start)
    starting.start()
    while process.pid is None:
        pass
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    starting.join()
    assert process.alive
    process.stop()


def test_stopping_fails_what_is_in_flight_and_may_be_done_twice(engine):
    future = engine.submit([1], ENDLESS)
    engine.stop()
    with pytest.raises(EngineDied, match="exit code 0"):
        future.result(0)
    assert not psutil.pid_exists(engine.pid)
    engine.stop()


def test_an_engine_that_hangs_is_killed_when_it_is_stopped(engine):
    future = engine.submit([1], ENDLESS)
    os.kill(engine.pid, signal.SIGSTOP)
    engine.stop(timeout_s=0.5)
    with pytest.raises(EngineDied, match="SIGKILL"):
        future.result(0)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("missing", ModelNotFound, "There is no model 'missing'. Look again."),
        ("broken", EngineDied, "exit code 1 while it loaded"),
    ],
)
def test_a_failed_start_raises_why(model, error, message):
    process = ToyProcess(EngineConfig(model))
    with pytest.raises(error, match=message):
        process.start()
    assert process.died.wait(WAIT_S)
    with pytest.raises(EngineDied):
        process.submit([1], GREEDY).result(0)


def test_a_start_that_takes_too_long_is_given_up():
    process = ToyProcess(EngineConfig("slow"))
    with pytest.raises(EngineDied, match=r"within 0\.2 s"):
        process.start(timeout_s=0.2)
    assert not process.alive


def test_the_engine_ends_when_its_owner_is_killed():
    script = """
process.submit(HANG, SamplingParams())
print(process.pid, flush=True)
threading.Event().wait()
"""
    owner = subprocess.Popen([sys.executable, "-c", OWNER + script], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(owner.stdout.readline()))
    assert child.is_running()
    owner.kill()
    owner.wait()
    child.wait(WAIT_S)
    owner.stdout.close()


def test_the_owner_needs_no_torch():
    script = "import sys, engine; assert engine.EngineProcess; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
