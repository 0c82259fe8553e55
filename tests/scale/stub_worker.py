"""`pagemill worker` with an engine that answers at once: what is left is the job plane."""

import sys

from engine.config import EngineConfig
from jobs.settings import settings
from workers.app import serve_model
from workers.stub_engine import StubProcess

MODEL = "stub"
_ROWS_IN_A_STEP = 256

if __name__ == "__main__":
    config = EngineConfig(MODEL, max_num_seqs=_ROWS_IN_A_STEP)
    sys.exit(serve_model(settings(), config, served_name=MODEL, slots=None, make_engine=StubProcess))
