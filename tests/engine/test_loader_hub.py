"""Models by hub id: from a cache without a network, pinned to a revision, and from a server that speaks as the hub."""

import json
import os
import subprocess
import sys
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from engine import EngineConfig
from engine.build import build_engine
from engine.errors import ModelNotFound
from engine.loader import ModelFileInvalid, load
from tests.engine.models_fixture import tiny_llama

CPU = torch.device("cpu")
OLD, NEW = "1" * 40, "2" * 40  # commits: two layers, and three


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with two commits of someone/tiny: the tag v1 and the branch main. There is no network."""
    repository = tmp_path / "cache" / "models--someone--tiny"
    tiny_llama(repository / "snapshots" / OLD)
    tiny_llama(repository / "snapshots" / NEW, num_hidden_layers=3)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(OLD)
    (repository / "refs" / "main").write_text(NEW)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository


@pytest.mark.parametrize(
    ("name", "layers", "commit"),
    [
        ("someone/tiny", 3, NEW),
        ("someone/tiny@main", 3, NEW),
        ("someone/tiny@v1", 2, OLD),
        (f"someone/tiny@{OLD}", 2, OLD),
    ],
)
def test_a_revision_names_the_commit_that_is_loaded_and_said(cache, name, layers, commit):
    loaded = load(name, dtype=None, device=CPU)
    assert (loaded.config.num_layers, loaded.revision) == (layers, commit)


@pytest.mark.parametrize("revision", ["v2", "3" * 40])
def test_a_revision_that_is_not_there_is_named(cache, revision):
    with pytest.raises(ModelNotFound, match=f"someone/tiny.*revision '{revision}'"):
        load(f"someone/tiny@{revision}", dtype=None, device=CPU)


def test_an_engine_says_which_commit_it_runs(cache):
    assert build_engine(EngineConfig("someone/tiny@v1", num_kv_blocks=16)).info.revision == OLD


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path):
    folder = tiny_llama(tmp_path / "tiny@v1")
    assert load(str(folder), dtype=None, device=CPU).revision is None


def test_a_repository_of_gguf_files_alone_says_what_to_do(cache):
    (cache / "snapshots" / NEW / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json.*GGUF"):
        load("someone/tiny", dtype=None, device=CPU)


def test_a_repository_of_pickles_alone_is_refused(cache):
    (cache / "snapshots" / NEW / "model.safetensors").unlink()
    with pytest.raises(ModelFileInvalid, match="convert them to safetensors"):
        load("someone/tiny", dtype=None, device=CPU)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as it takes to fetch someone/tiny, one commit of it on the branch main."""

    folder: Path
    asked: list[str]

    def do_HEAD(self):
        self._answer(send_body=False)

    def do_GET(self):
        self._answer(send_body=True)

    def log_message(self, *_):
        pass

    def _answer(self, *, send_body: bool):
        path = self.path.partition("?")[0]
        resolved = f"/someone/tiny/resolve/{NEW}/"
        names = sorted(file.name for file in self.folder.iterdir())
        if path == "/api/models/someone/tiny/revision/main":
            files = [{"rfilename": name} for name in names]
            self._send(json.dumps({"id": "someone/tiny", "sha": NEW, "siblings": files}).encode(), send_body)
        elif path == f"/api/models/someone/tiny/tree/{NEW}":
            files = [
                {"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": name}
                for name in names
            ]
            self._send(json.dumps(files).encode(), send_body)
        elif path.removeprefix(resolved) in names:
            self.asked.append(path.removeprefix(resolved))
            self._send((self.folder / path.removeprefix(resolved)).read_bytes(), send_body)
        else:
            self.send_error(404)

    def _send(self, body: bytes, send_body: bool):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", NEW)
        self.end_headers()
        if send_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    folder = tiny_llama(tmp_path / "served", tokenizer=True)
    for name in ("pytorch_model.bin", "training_args.pt", "modeling_tiny.py", "consolidated.safetensors"):
        (folder / name).write_bytes(b"not wanted")
    handler = type("TinyHub", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


LOCATE = """
import sys
from engine.loader.locate import locate_model
print(*locate_model("someone/tiny", with_code=bool(sys.argv[1])))
"""


@pytest.mark.parametrize("code", ["", "yes"], ids=["data", "data and code"])
def test_a_repository_is_fetched_without_pickles_and_with_code_only_if_asked(tmp_path, hub, code):
    handler, endpoint = hub
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", LOCATE, code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    folder, revision = done.stdout.split()
    assert revision == NEW
    assert load(folder, dtype=None, device=CPU).tokenizer is not None
    fetched = {file.name for file in Path(folder).iterdir()}
    assert fetched == set(handler.asked)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= fetched
    unwanted = {"pytorch_model.bin", "training_args.pt", "modeling_tiny.py", "consolidated.safetensors"}
    assert fetched & unwanted == ({"modeling_tiny.py"} if code else set())
