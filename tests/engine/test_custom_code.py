"""Models that come with Python code of their own: run only for those who trust it."""

import json

import pytest
import torch

from engine import EngineConfig
from engine.build import build_engine
from engine.errors import ConfigError, ModelNotSupported
from engine.loader import ModelFileInvalid, load
from engine.models.decoder import Decoder
from engine.models.fallback import FallbackDecoder
from tests.engine.models_fixture import PagedRun, tiny_llama

CPU = torch.device("cpu")
CONFIGURATION = """
from transformers import LlamaConfig

class TinyConfig(LlamaConfig):
    model_type = "tiny_of_its_own"
"""
MODELLING = """
from pathlib import Path
from transformers import LlamaForCausalLM
from .configuration_tiny import TinyConfig

Path({marker!r}).touch()

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Where Transformers copies code to, and imports it from: one place for a process's life."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture
def marker(tmp_path):
    """A file that the model's code makes when it is run."""
    return tmp_path / "the code ran"


@pytest.fixture
def folder(tmp_path, marker, modules, monkeypatch):
    """The tiny Llama under an architecture that only the folder's own code knows."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    folder = tiny_llama(tmp_path / "tiny")
    (folder / "configuration_tiny.py").write_text(CONFIGURATION)
    (folder / "modeling_tiny.py").write_text(MODELLING.format(marker=str(marker)))
    edit_config(folder, architectures=["TinyForCausalLM"], model_type="tiny_of_its_own")
    return folder


def edit_config(folder, **fields) -> None:
    path = folder / "config.json"
    auto_map = {
        "AutoConfig": "configuration_tiny.TinyConfig",
        "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map, **fields}))


def test_code_that_nobody_trusts_is_refused_and_not_run(folder, marker):
    with pytest.raises(ModelNotSupported, match=r"TinyForCausalLM.*set trust_remote_code"):
        load(str(folder), dtype=torch.float32, device=CPU)
    assert not marker.exists()


def test_code_that_is_trusted_runs_and_gives_the_logits_of_its_model(folder, marker, tmp_path):
    loaded = load(str(folder), dtype=torch.float32, device=CPU, trust_remote_code=True)
    assert marker.exists()
    assert loaded.config.architecture == "TinyForCausalLM"
    native = load(str(tiny_llama(tmp_path / "native")), dtype=torch.float32, device=CPU)
    ids = list(range(3, 40))
    logits, expected = (PagedRun(model.decoder).step({"a": ids})["a"] for model in (loaded, native))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_the_engines_option_is_what_trusts(folder):
    with pytest.raises(ModelNotSupported, match="trust_remote_code"):
        build_engine(EngineConfig(str(folder), num_kv_blocks=16))
    build_engine(EngineConfig(str(folder), num_kv_blocks=16, trust_remote_code=True))


def test_a_family_with_a_table_never_runs_the_code_beside_it(folder, marker):
    edit_config(folder, architectures=["LlamaForCausalLM"], model_type="llama")
    for trust_remote_code in (False, True):
        loaded = load(str(folder), dtype=torch.float32, device=CPU, trust_remote_code=trust_remote_code)
        assert isinstance(loaded.decoder, Decoder)
    loaded = load(str(folder), dtype=torch.float32, device=CPU, model_impl="transformers")
    assert isinstance(loaded.decoder, FallbackDecoder)
    assert not marker.exists()


def test_code_that_is_broken_is_said_to_be(folder):
    (folder / "modeling_tiny.py").write_text("class TinyForCausalLM(:\n")
    with pytest.raises(ModelFileInvalid, match="code for TinyForCausalLM"):
        load(str(folder), dtype=torch.float32, device=CPU, trust_remote_code=True)


def test_code_that_names_no_causal_model_is_refused_even_if_trusted(folder):
    edit_config(folder, auto_map={"AutoConfig": "configuration_tiny.TinyConfig"})
    with pytest.raises(ModelNotSupported, match="no causal language model"):
        load(str(folder), dtype=torch.float32, device=CPU, trust_remote_code=True)


@pytest.mark.parametrize("options", [{"model_impl": "vllm"}, {"trust_remote_code": "yes"}])
def test_an_option_that_is_none_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineConfig("demo", **options)
