"""The keeper of the engine process: deaths are survived, and only the request that causes them finds its error."""

import threading
from collections.abc import Iterator

import pytest

from engine.errors import EngineDied, ModelNotFound, RequestError
from engine.outputs import EngineOutput, RequestOutput
from engine.sampling.params import SamplingParams
from tests.workers.stub_engine import CONFIG, INFO, Engines
from workers.host import Call, EngineHost
from workers.render import EngineRequest

PARAMS = SamplingParams()
WAIT_S = 20


@pytest.fixture
def host(engines: Engines) -> Iterator[EngineHost]:
    host = EngineHost(CONFIG, engines)
    assert host.start() == INFO
    yield host
    host.stop()


class Asked:
    """Requests that one caller made of a host, and what it was told of them."""

    def __init__(self, host: EngineHost, *prompts: str) -> None:
        self._told = threading.Condition()
        self._answered: list[Call] = []
        self.calls = host.submit([EngineRequest(prompt, PARAMS) for prompt in prompts], self._take)

    def _take(self, calls: list[Call]) -> None:
        with self._told:
            self._answered += calls
            self._told.notify_all()

    def answer(self, place: int) -> EngineOutput | RequestError | EngineDied | None:
        with self._told:
            assert self._told.wait_for(lambda: self.calls[place] in self._answered, WAIT_S)
            assert self._answered.count(self.calls[place]) == 1
        return self.calls[place].answer

    def text(self, place: int) -> str:
        output = self.answer(place)
        assert isinstance(output, RequestOutput)
        return output.outputs[0].text

    def texts(self) -> list[str]:
        return [self.text(place) for place in range(len(self.calls))]


def test_calls_are_answered(host: EngineHost) -> None:
    assert Asked(host, "a", "b").texts() == ["answer to a", "answer to b"]


def test_an_engine_that_cannot_load_its_model_says_so(engines: Engines) -> None:
    engines.do_not_start.append(ModelNotFound("There is no such model."))
    host = EngineHost(CONFIG, engines)
    with pytest.raises(ModelNotFound):
        host.start()
    host.stop()


def test_what_was_in_flight_is_asked_again_when_the_engine_dies(engines: Engines, host: EngineHost) -> None:
    engines.by_hand = True
    asked = Asked(host, "a", "b", "c")
    engines.last.die()
    engines.wait_for(2)
    engines.last.wait_for(3)
    assert [call.answer for call in asked.calls] == [None] * 3
    engines.last.step()
    assert asked.texts() == ["answer to a", "answer to b", "answer to c"]
    assert host.restarts == 1
    assert host.engine_pid == engines.last.pid


def test_the_call_that_kills_the_engine_gets_its_error_and_its_neighbours_their_answers(
    engines: Engines, host: EngineHost
) -> None:
    asked = Asked(host, "a", "some poison", "b", "c")
    error = asked.answer(1)
    assert isinstance(error, RequestError)
    assert "died each time" in str(error)
    assert error.code == "engine_error"
    assert [asked.text(place) for place in (0, 2, 3)] == ["answer to a", "answer to b", "answer to c"]
    assert host.restarts <= 3
    assert Asked(host, "d").texts() == ["answer to d"]


def test_two_calls_that_kill_the_engine_are_both_found(host: EngineHost) -> None:
    asked = Asked(host, "poison 1", "a", "poison 2", "b")
    assert all(isinstance(asked.answer(guilty), RequestError) for guilty in (0, 2))
    assert [asked.text(place) for place in (1, 3)] == ["answer to a", "answer to b"]


def test_one_call_in_64_that_kills_the_engine_is_found_in_five_deaths(engines: Engines, host: EngineHost) -> None:
    """Two make suspects of them all; then a group of 16 dies, one of 4, and the one alone."""
    engines.by_hand = True
    asked = Asked(host, *(f"p{n}" for n in range(63)), "poison")
    split = [False, False, False, True]
    for size, deadly in [(64, True), (64, True), *((size, last) for size in (16, 4, 1) for last in split)]:
        engine = engines.last
        engine.wait_for(size)
        assert len(engine.in_flight()) == size
        engine.step()
        assert engine.died.is_set() == deadly
        if deadly:
            engines.wait_for(engines.made.index(engine) + 2)
    assert isinstance(asked.answer(63), RequestError)
    assert [asked.text(n) for n in range(63)] == [f"answer to p{n}" for n in range(63)]
    assert host.restarts == 5


def test_two_calls_in_64_that_kill_the_engine_are_found_in_eight_deaths(engines: Engines, host: EngineHost) -> None:
    engines.by_hand = True
    prompts = ["poison" if n in (3, 40) else f"p{n}" for n in range(64)]
    asked = Asked(host, *prompts)
    engines.last.wait_for(64)
    engines.by_hand = False
    engines.last.step()
    for place, prompt in enumerate(prompts):
        if prompt == "poison":
            assert isinstance(asked.answer(place), RequestError)
        else:
            assert asked.text(place) == f"answer to {prompt}"
    engines.wait_for(host.restarts + 1)
    assert 5 < host.restarts <= 8


def test_a_group_on_trial_runs_with_nobody_beside_it(engines: Engines, host: EngineHost) -> None:
    """Not even when it is the last group, and others are asked meanwhile."""
    engines.by_hand = True
    asked = Asked(host, "poison")
    for death in (1, 2):
        engines.last.wait_for(1)
        engines.last.step()
        engines.wait_for(death + 1)
    engines.last.wait_for(1)
    late = Asked(host, "late")
    assert engines.asked[-1] == "poison"
    engines.last.step()
    assert isinstance(asked.answer(0), RequestError)
    engines.wait_for(4)
    engines.last.wait_for(1)
    engines.last.step()
    assert late.texts() == ["answer to late"]


def test_calls_have_begun_when_the_engine_has_begun_with_them(engines: Engines, host: EngineHost) -> None:
    engines.by_hand = True
    asked = Asked(host, *"abcdefgh")
    for death in (1, 2):
        engines.last.wait_for(8)
        engines.last.die()
        engines.wait_for(death + 1)
    engines.last.wait_for(2)
    assert [call.began_at for call in asked.calls] == [None] * 8
    engines.last.begin()
    assert [call.began_at is not None for call in asked.calls] == [True] * 2 + [False] * 6
    for _ in range(4):
        engines.last.wait_for(2)
        engines.last.step()
    assert asked.texts() == [f"answer to {prompt}" for prompt in "abcdefgh"]


def test_aborted_calls_leave_their_group(engines: Engines, host: EngineHost) -> None:
    engines.by_hand = True
    asked = Asked(host, *"abcdefgh")
    for death in (1, 2):
        engines.last.wait_for(8)
        engines.last.die()
        engines.wait_for(death + 1)
    engines.last.wait_for(2)
    host.abort(asked.calls[1:5])
    engines.last.step()
    engines.last.wait_for(1)
    assert [prompt for _, prompt in engines.last.in_flight()] == ["f"]
    engines.last.step()
    engines.last.wait_for(2)
    engines.last.step()
    assert [asked.text(n) for n in (0, 5, 6, 7)] == [f"answer to {prompt}" for prompt in "afgh"]
    assert engines.asked.count("c") == engines.asked.count("e") == 2


def test_only_a_death_that_taught_nothing_makes_the_next_engine_wait_longer(
    engines: Engines, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.host._MAX_RESTART_DELAY_S", 60)
    delays: list[float] = []
    restart = host._restart
    monkeypatch.setattr(host, "_restart", lambda delay: delays.append(delay) or restart(0))
    engines.by_hand = True
    for death in (1, 2):
        engines.last.die()
        engines.wait_for(death + 1)
    Asked(host, *(f"p{n}" for n in range(16)))
    for size in (16, 16, 4, 1):
        made = len(engines.made)
        engines.last.wait_for(size)
        engines.last.die()
        engines.wait_for(made + 1)
    assert delays == [0.02, 0.04, 0.08, 0.01, 0.01, 0.01]


def test_a_machine_that_fails_twice_accuses_nobody(engines: Engines, host: EngineHost) -> None:
    """After that, those that were there both times run by groups: three of one each."""
    engines.by_hand = True
    asked = Asked(host, "a", "b", "c")
    for death in (1, 2):
        engines.last.wait_for(3)
        engines.last.die()
        engines.wait_for(death + 1)
    engines.most_in_flight = 0
    late = Asked(host, "late")
    for _ in range(3):
        engines.last.wait_for(1)
        engines.last.step()
    engines.last.wait_for(1)
    engines.last.step()
    assert asked.texts() + late.texts() == [f"answer to {p}" for p in ("a", "b", "c", "late")]
    assert engines.most_in_flight == 1


def test_an_engine_that_does_not_start_again_is_tried_again(engines: Engines, host: EngineHost) -> None:
    engines.do_not_start += [EngineDied("no memory"), EngineDied("no memory yet")]
    engines.last.die()
    assert Asked(host, "a").texts() == ["answer to a"]
    assert host.restarts == 1
    assert len(engines.made) == 4


def test_a_stop_ends_open_calls_with_engine_died(engines: Engines, host: EngineHost) -> None:
    engines.by_hand = True
    asked = Asked(host, "a", "b")
    engines.last.wait_for(2)
    host.stop()
    assert [str(asked.answer(place)) for place in (0, 1)] == ["The worker stops its engine."] * 2
    assert engines.last.died.is_set()


def test_a_stop_while_the_engine_is_down_ends_calls_that_wait(engines: Engines, host: EngineHost) -> None:
    engines.do_not_start += [EngineDied("no memory")] * 1000
    engines.last.die()
    asked = Asked(host, "a")
    host.stop()
    assert isinstance(asked.answer(0), EngineDied)


def test_a_stop_while_the_engine_starts_again_ends_that_one_too(engines: Engines, host: EngineHost) -> None:
    starting, go_on = threading.Event(), threading.Event()

    def load_slowly() -> None:
        starting.set()
        assert go_on.wait(WAIT_S)

    engines.on_start = load_slowly
    engines.last.die()
    assert starting.wait(WAIT_S)
    stop = threading.Thread(target=host.stop)
    stop.start()
    go_on.set()
    stop.join(WAIT_S)
    assert not stop.is_alive()
    assert len(engines.made) == 2
    assert engines.last.died.is_set()


def test_each_caller_is_told_of_its_own_calls_at_once(engines: Engines, host: EngineHost) -> None:
    engines.by_hand = True
    told: list[tuple[str, list[str]]] = []
    for name, prompts in (("one", ["a", "b"]), ("other", ["c", "d", "e"])):
        host.submit(
            [EngineRequest(prompt, PARAMS) for prompt in prompts],
            lambda calls, name=name: told.append((name, [call.answer.outputs[0].text for call in calls])),  # type: ignore[misc]
        )
    engines.last.wait_for(5)
    engines.last.step()
    assert told == [
        ("one", ["answer to a", "answer to b"]),
        ("other", ["answer to c", "answer to d", "answer to e"]),
    ]


def test_aborted_calls_are_not_asked_again(engines: Engines, host: EngineHost) -> None:
    engines.by_hand = True
    asked = Asked(host, "a", "b", "c")
    engines.last.wait_for(3)
    host.abort(asked.calls[:2])
    engines.last.die()
    engines.wait_for(2)
    engines.last.wait_for(1)
    assert engines.asked[-1] == "c"
    assert engines.asked.count("a") == engines.asked.count("b") == 1
    engines.last.step()
    assert asked.text(2) == "answer to c"


def test_aborted_calls_that_were_never_sent_are_forgotten(engines: Engines, host: EngineHost) -> None:
    engines.do_not_start.append(EngineDied("no memory"))
    engines.last.die()
    asked = Asked(host, "a", "b")
    host.abort(asked.calls[:1])
    assert asked.text(1) == "answer to b"
    assert "a" not in engines.asked[-1:]


def test_an_engine_that_does_not_come_back_is_given_up(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host._RESTART_DELAY_S", 0.001)
    given_up = threading.Event()
    host = EngineHost(CONFIG, engines, on_hopeless=given_up.set)
    host.start()
    engines.do_not_start += [ModelNotFound("The disk is gone.")] * 4
    engines.last.die()
    assert given_up.wait(WAIT_S)
    host.stop()


def test_an_engine_that_comes_back_after_a_while_is_not_given_up(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.host._RESTART_DELAY_S", 0.001)
    given_up = threading.Event()
    host = EngineHost(CONFIG, engines, on_hopeless=given_up.set)
    host.start()
    engines.do_not_start += [ModelNotFound("The disk is slow.")] * 3
    engines.last.die()
    assert Asked(host, "a").texts() == ["answer to a"]
    assert not given_up.is_set()
    host.stop()
