"""What the compiler makes of every kernel, for architectures of which this machine has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.triton import launch
from kernels.triton.launch import SHARED_MEMORY, TENSOR_MEMORY_COLUMNS, Launch, launch_on
from tests.kernels.triton import offline
from tests.kernels.triton.offline import Compiled


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Every specialisation on every architecture, compiled in a process that does not interpret."""
    table = tmp_path_factory.mktemp("offline") / "table.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", offline.__name__, "--json", str(table)]
    repository = Path(offline.__file__).parents[3]
    run = subprocess.run(command, env=environment, cwd=repository, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [Compiled(**row) for row in json.loads(table.read_text())]


def test_every_specialisation_compiles_for_every_architecture(compiled: list[Compiled]) -> None:
    assert compiled
    assert [f"{one.name} sm_{one.architecture}: {one.error}" for one in compiled if one.error] == []
    wanted = [(one.name, architecture) for one in offline.specialisations() for architecture in one.architectures]
    assert [(one.name, one.architecture) for one in compiled] == wanted


def test_hot_kernels_spill_no_registers(compiled: list[Compiled]) -> None:
    assert all(one.registers > 0 for one in compiled)
    assert [f"{one.name} sm_{one.architecture}: {one.spills}" for one in compiled if one.hot and one.spills] == []


def test_no_kernel_needs_more_shared_memory_than_there_is(compiled: list[Compiled]) -> None:
    too_large = [one for one in compiled if one.shared > SHARED_MEMORY[one.architecture]]
    assert [f"{one.name} sm_{one.architecture}: {one.shared}" for one in too_large] == []
    assert [f"{one.name}: {one.tensor_memory}" for one in compiled if one.tensor_memory > TENSOR_MEMORY_COLUMNS] == []


def test_matrix_kernels_use_wgmma_on_sm_90(compiled: list[Compiled]) -> None:
    matrix = [one for one in compiled if one.matrix and one.architecture == 90]
    assert matrix
    assert [one.name for one in matrix if not one.wgmma] == []


def test_products_of_float32_lose_no_bits_of_their_factors(compiled: list[Compiled]) -> None:
    assert [f"{one.name} sm_{one.architecture}" for one in compiled if one.tf32] == []


def test_every_kernel_is_listed() -> None:
    assert offline.unlisted_kernels() == []


def test_names_of_specialisations_differ() -> None:
    names = [one.name for one in offline.specialisations()]
    assert sorted(names) == sorted(set(names))


def test_every_row_of_the_launch_table_is_compiled() -> None:
    assert {one.launch for one in offline.specialisations()} == set(launch._TABLE)


def test_an_unknown_architecture_takes_the_next_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {architecture: Launch({}, num_warps=architecture) for architecture in (86, 90, 100)}
    monkeypatch.setitem(launch._TABLE, "toy", entries)
    found = {asked: launch_on("toy", asked).num_warps for asked in (86, 89, 90, 100, 103, 120, 121)}
    assert found == {86: 86, 89: 86, 90: 90, 100: 100, 103: 100, 120: 86, 121: 86}
    with pytest.raises(LookupError, match="toy does not run on sm_80: it needs sm_86"):
        launch_on("toy", 80)
