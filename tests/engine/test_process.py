"""The engine in a process of its own: what it answers, and what its owner learns when either of them dies."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from engine import EngineConfig, EngineDied, ModelNotFound, SamplingParams
from engine.messages import NewRequest
from engine.process import EngineProcess
from tests.engine.toy import answer
from tests.engine.toy_process import HANG, ToyProcess


class Reporting(EngineProcess):
    _child_main = "tests.engine.toy_process"


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
        futures = {n: unharmed.ask([thread, n], GREEDY) for n in range(20)}
        answers[thread] = {n: future.result(WAIT_S) for n, future in futures.items()}

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    bad = unharmed.ask([9999], GREEDY)
    long = unharmed.ask([1] * 4000, GREEDY)
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


def test_an_aborted_request_gives_what_it_has(engine):
    future = engine.ask([1], ENDLESS)
    assert engine.ask([2], GREEDY).result(WAIT_S).error is None
    engine.abort([0])
    output = future.result(WAIT_S)
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 3000
    engine.abort([0])
    assert engine.ask([2], GREEDY).result(WAIT_S).error is None


def test_requests_that_are_handed_over_together_are_reported_together():
    reports = []
    started = []
    all_answered = threading.Event()

    def take(outputs):
        reports.append([output.index for output in outputs])
        if sum(map(len, reports)) == 3:
            all_answered.set()

    process = Reporting(EngineConfig("toy"), take, started.append)
    process.start()
    same_length = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    process.submit([NewRequest(index, [index], same_length) for index in range(3)])
    assert all_answered.wait(WAIT_S)
    process.stop()
    assert reports == [[0, 1, 2]]
    assert started == [(0, 1, 2)]


def test_the_owner_knows_what_a_step_began_with_before_it_ends(engine):
    engine.ask(HANG, GREEDY)
    assert engine.begun.wait(WAIT_S)
    assert engine.started == [0]


def test_what_cannot_be_sent_raises_to_its_sender_and_harms_nobody(unharmed):
    with pytest.raises(TypeError, match="pickle"):
        unharmed.ask((n for n in range(3)), GREEDY)
    assert unharmed.ask([2], GREEDY).result(WAIT_S).error is None


def test_a_killed_engine_answers_nothing_and_says_by_which_signal(engine):
    futures = [engine.ask([n], ENDLESS) for n in range(10)]
    os.kill(engine.pid, signal.SIGKILL)
    assert engine.died.wait(WAIT_S)
    assert str(engine.death) == "The engine process ended by signal SIGKILL."
    assert not engine.alive
    futures.append(engine.ask([1], GREEDY))
    assert not any(future.done() for future in futures)


OWNER = """
import sys, threading
from engine import EngineConfig, SamplingParams
from tests.engine.toy_process import CRASH, HANG, ToyProcess
process = ToyProcess(EngineConfig("toy"))
process.start()
"""


def test_a_crash_in_a_step_leaves_a_traceback_on_stderr_and_an_exit_code():
    script = """
other = process.ask([1], SamplingParams(max_tokens=3000, ignore_eos=True))
crash = process.ask(CRASH, SamplingParams())
process.died.wait(60)
print(process.death, other.done(), crash.done())
"""
    owner = subprocess.run([sys.executable, "-c", OWNER + script], capture_output=True, text=True, check=True)
    assert owner.stdout == "The engine process ended with exit code 1. False False\n"
    assert "noise of a library" in owner.stderr, "the child's stdout is not its owner's"
    assert "Traceback" in owner.stderr
    assert "the toy was told to crash" in owner.stderr


def test_termination_signals_are_the_owners_business(unharmed):
    os.kill(unharmed.pid, signal.SIGTERM)
    os.kill(unharmed.pid, signal.SIGINT)
    assert unharmed.ask([2], GREEDY).result(WAIT_S).error is None


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


def test_stopping_loses_what_is_in_flight_and_may_be_done_twice(engine):
    future = engine.ask([1], ENDLESS)
    engine.stop()
    assert str(engine.death) == "The engine process ended with exit code 0."
    assert not future.done()
    assert not psutil.pid_exists(engine.pid)
    engine.stop()


def test_an_engine_that_hangs_is_killed_when_it_is_stopped(engine):
    future = engine.ask([1], ENDLESS)
    os.kill(engine.pid, signal.SIGSTOP)
    engine.stop(timeout_s=0.5)
    assert "SIGKILL" in str(engine.death)
    assert not future.done()


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


def test_a_start_that_takes_too_long_is_given_up():
    process = ToyProcess(EngineConfig("slow"))
    with pytest.raises(EngineDied, match=r"within 0\.2 s"):
        process.start(timeout_s=0.2)
    assert not process.alive


def test_the_engine_ends_when_its_owner_is_killed():
    script = """
process.ask(HANG, SamplingParams())
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
