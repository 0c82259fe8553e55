"""The seeds of the fuzzer, and whatever it found: each is planned, run and written as any input is."""

from pathlib import Path

import pytest

from tests.fuzz.cases import KINDS, case_of, check

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.mark.parametrize("seed", CORPUS, ids=lambda path: path.name)
def test_what_the_fuzzer_begins_with_and_has_found_is_run_or_refused(seed: Path) -> None:
    check(case_of(seed.read_bytes()))


def test_the_seeds_are_of_all_kinds_and_have_rows_that_run() -> None:
    cases = {seed.name: case_of(seed.read_bytes()) for seed in CORPUS}
    assert {case.files[0][0].split(".")[1] for case in cases.values()} == {kind.strip(".") for kind in KINDS}
    assert [check(cases[name]) for name in ("records", "csv", "parquet-zstd", "openai")] == ["planned"] * 4
