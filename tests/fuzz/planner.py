"""The planner under atheris: `make fuzz`, or `python -m tests.fuzz.planner [options of libFuzzer] CORPUS...`."""

import sys

import atheris

# What is imported here is instrumented: the fuzzer sees which of its bytes lead to new places.
with atheris.instrument_imports(include=["jobs"]):
    from tests.fuzz.cases import case_of, check

if __name__ == "__main__":
    atheris.Setup(sys.argv, lambda data: check(case_of(data)))
    atheris.Fuzz()
