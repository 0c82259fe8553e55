"""The table of the problems and the tests: neither has what the other lacks."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PROBLEMS = range(1, 26)


def names_in(path: Path) -> set[str]:
    found = ast.parse(path.read_text()).body
    return {item.name for item in found if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")}


def table() -> dict[int, list[str]]:
    """The tests of each problem, as the table names them."""
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return {int(number): re.findall(r"`([^`]+)`", tests) for number, tests in rows}


def test_every_problem_has_a_test() -> None:
    found = table()
    assert list(found) == list(PROBLEMS)
    assert all(found.values())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_test_that_the_table_names_is_there(problem: int) -> None:
    for named in table()[problem]:
        path, _, name = named.partition("::")
        assert name in names_in(FOLDER / path)


def test_every_test_of_a_problem_is_in_the_table() -> None:
    named = {name for tests in table().values() for name in tests}
    files = [path for path in FOLDER.glob("test_*.py") if path != Path(__file__)]
    assert {f"{path.name}::{name}" for path in files for name in names_in(path)} <= named
