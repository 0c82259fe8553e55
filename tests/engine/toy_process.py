"""An engine process with the toy model in it, for tests of what happens to processes."""

import threading

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ModelNotFound
from engine.process_loop import serve
from tests.engine.asking import AskingProcess
from tests.engine.toy import toy_core, toy_limits, toy_runner

CRASH = [66, 66, 66]
HANG = [77, 77, 77]


class ToyProcess(AskingProcess):
    _child_main = "tests.engine.toy_process"


class _Runner:
    """Fails in the ways a device fails, when a prompt asks for it."""

    def __init__(self, runner):
        self._runner = runner

    def move_blocks(self, moves):
        self._runner.move_blocks(moves)

    def execute(self, plan):
        for row in plan.rows:
            if list(row.sequence.request.prompt_token_ids) == CRASH:
                raise ValueError("the toy was told to crash")
            if list(row.sequence.request.prompt_token_ids) == HANG:
                threading.Event().wait()
        return self._runner.execute(plan)


def build(config: EngineConfig) -> EngineCore:
    if config.model == "missing":
        raise ModelNotFound("There is no model 'missing'.", hint="Look again.")
    if config.model == "broken":
        raise ValueError("the toy does not load")
    if config.model == "slow":
        threading.Event().wait()
    print("noise of a library on stdout")  # noqa: T201
    limits = toy_limits(max_model_len=4000, num_kv_blocks=1001)
    return toy_core(limits, runner=_Runner(toy_runner(limits)))


def main(file_descriptor: int) -> None:
    serve(file_descriptor, build)
