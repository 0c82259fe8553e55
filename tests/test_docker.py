"""The images and the compose file, as far as they can be held against the code without a container engine."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from jobs.cli import _make_app
from jobs.settings import Settings
from tests.servers import S3Server

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<how>[-?])(?P<word>[^}]*))?\}")


def example_environment() -> dict[str, str]:
    lines = (DOCKER / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolated(value: Any, environment: dict[str, str]) -> Any:
    """A compose value with its variables filled in, as Compose does it."""

    def fill(match: re.Match[str]) -> str:
        name, how, word = match["name"], match["how"], match["word"]
        if how == "?" and not environment.get(name):
            raise KeyError(f"{name}: {word}")
        return environment.get(name) or (word if how == "-" else environment[name])

    match value:
        case str():
            return _VARIABLE.sub(fill, value)
        case list():
            return [interpolated(item, environment) for item in value]
        case dict():
            return {key: interpolated(item, environment) for key, item in value.items()}
    return value


def compose() -> dict[str, Any]:
    return interpolated(yaml.safe_load((DOCKER / "compose.yaml").read_text()), example_environment())


SERVICES = compose()["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service and "entrypoint" not in service}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stages that it is built on among them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            parent, _, name = rest.split()
            stage = found[name] = list(found.get(parent, []))
        stage.append((word, rest))
    return found


def in_build_context(path: str) -> bool:
    """Whether `.dockerignore` lets a path at its root, or a file named in full, through."""
    ignored = False
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern and not pattern.startswith("#") and fnmatch(path, pattern.removeprefix("!")):
            ignored = not pattern.startswith("!")
    return not ignored


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_command_that_parses(name: str) -> None:
    command, *arguments = OURS[name]["command"]
    group = typer.main.get_command(_make_app())
    with group.make_context("pagemill", [command], resilient_parsing=True) as context:
        found = group.get_command(context, command)
        assert found is not None, f"there is no command {command}"
        found.make_context(command, arguments)


@pytest.mark.parametrize("name", OURS)
def test_a_health_check_is_a_command_that_parses(name: str) -> None:
    how, program, command, *arguments = OURS[name]["healthcheck"]["test"]
    assert (how, program) == ("CMD", "pagemill")
    group = typer.main.get_command(_make_app())
    with group.make_context("pagemill", [command], resilient_parsing=True) as context:
        group.get_command(context, command).make_context(command, arguments)


@pytest.mark.parametrize("name", OURS)
def test_the_environment_of_a_service_is_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = OURS[name]["environment"]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(value))
    fields = {variable.removeprefix("PAGEMILL_").lower() for variable in environment}
    assert fields <= set(Settings.model_fields)
    settings = Settings()
    assert settings.ledger_url == "redis://:change-me@valkey:6379/0"
    assert settings.storage_url == "s3://pagemill"
    assert settings.s3_secret_access_key is not None
    assert settings.s3_secret_access_key.get_secret_value() == "change-me"


@pytest.mark.parametrize("name", OURS)
def test_a_container_may_take_longer_to_stop_than_its_worker(name: str) -> None:
    grace = float(OURS[name]["environment"]["PAGEMILL_STOP_GRACE"])
    assert float(OURS[name]["stop_grace_period"].removesuffix("s")) > grace


def test_images_of_others_are_pinned_to_a_version() -> None:
    images = {service["image"] for service in SERVICES.values() if "build" not in service}
    assert images
    for image in images:
        assert re.search(r":\d+\.\d+(\.\d+)?$", image), image


def test_variables_are_in_the_example() -> None:
    asked = {match["name"] for match in _VARIABLE.finditer((DOCKER / "compose.yaml").read_text())}
    assert asked | {"COMPOSE_PROFILES"} == set(example_environment())


def test_a_missing_secret_stops_compose() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for match in _VARIABLE.finditer(text):
        secret = "PASSWORD" in match["name"] or "ACCESS_KEY" in match["name"]
        assert secret == (match["how"] == "?"), match[0]


def test_what_services_refer_to_exists() -> None:
    named = compose()["volumes"].keys()
    mounted = {mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())}
    assert {volume for volume in mounted if not volume.startswith((".", "/"))} == set(named)
    for service in SERVICES.values():
        assert service.get("depends_on", {}).keys() <= SERVICES.keys()
    assert example_environment()["COMPOSE_PROFILES"] in {p for s in SERVICES.values() for p in s.get("profiles", ())}


def test_a_service_waited_for_to_be_healthy_has_a_check() -> None:
    for service in SERVICES.values():
        for other, wait in service.get("depends_on", {}).items():
            assert wait["condition"] != "service_healthy" or "test" in SERVICES[other]["healthcheck"]


def test_valkey_keeps_what_it_acknowledged() -> None:
    command = SERVICES["valkey"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "--maxmemory" in options


def test_only_the_gpu_worker_reserves_a_gpu() -> None:
    reserving = {name for name, service in SERVICES.items() if "deploy" in service}
    assert reserving == {"worker-gpu"}
    (device,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_the_bucket_is_made_once(moto_s3: S3Server) -> None:
    service = SERVICES["bucket"]
    program, option = service["entrypoint"]
    assert program == "python"
    endpoint = {"AWS_ENDPOINT_URL_S3": moto_s3.endpoint, "S3_BUCKET": "made-by-compose"}
    environment = {name: str(value) for name, value in service["environment"].items()} | endpoint
    for _ in range(2):
        subprocess.run([sys.executable, option, *service["command"]], env=environment, check=True, timeout=60)
    names = [bucket["Name"] for bucket in moto_s3.client().list_buckets()["Buckets"]]
    assert names.count("made-by-compose") == 1


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" in service])
def test_a_build_names_a_file_and_a_target_that_exist(name: str) -> None:
    build = SERVICES[name]["build"]
    context = (DOCKER / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    assert build["target"] in stages()
    declared = {rest.partition("=")[0] for word, rest in stages()[build["target"]] if word == "ARG"}
    assert {argument.partition("=")[0] for argument in build["args"]} <= declared


def test_what_is_copied_is_in_the_build_context() -> None:
    sources = [
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source == "." or in_build_context(source), source


def test_the_build_context_holds_what_the_wheel_is_made_of() -> None:
    packages = [pattern.removesuffix("*") for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
    for path in ["pyproject.toml", PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"], *packages]:
        assert in_build_context(path), path
    for path in [".git", ".venv", "tests", "shared"]:
        assert not in_build_context(path), path


@pytest.mark.parametrize("target", ["control", "worker"])
def test_an_image_runs_pagemill_as_no_root(target: str) -> None:
    stage = stages()[target]
    last = dict(stage)
    assert json.loads(last["ENTRYPOINT"]) == ["pagemill"]
    assert last["USER"] == "pagemill"
    assert any(word == "RUN" and "useradd" in rest and "pagemill" in rest for word, rest in stage)


def test_only_the_worker_image_carries_torch() -> None:
    with_torch = {
        name for name, stage in stages().items() if any("torch" in rest for word, rest in stage if word == "RUN")
    }
    assert with_torch == {"torch", "installed", "kernels", "worker"}


def test_images_install_what_pyproject_requires() -> None:
    def printed(*extras: str) -> list[str]:
        command = [sys.executable, "docker/requirements.py", *extras]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    project = PYPROJECT["project"]
    assert printed() == project["dependencies"]
    assert printed("worker") == project["dependencies"] + project["optional-dependencies"]["worker"]
    with pytest.raises(subprocess.CalledProcessError):
        printed("no-such-extra")


def environment_of(stage: str) -> dict[str, str]:
    settings = [setting for word, rest in stages()[stage] if word == "ENV" for setting in shlex.split(rest)]
    return dict(setting.split("=", 1) for setting in settings)


def test_the_workers_image_brings_the_kernels_and_no_compiler(tmp_path: Path) -> None:
    folder = environment_of("kernels")["PAGEMILL_KERNEL_CACHE"]
    assert ("COPY", f"--from=kernels {folder} {folder}") in stages()["worker"]
    assert environment_of("worker")["PAGEMILL_KERNEL_CACHE"] == folder
    assert not any("g++" in rest for _, rest in stages()["worker"])
    (step,) = [rest for word, rest in stages()["kernels"] if word == "RUN" and "kernels.cpu" in rest]
    environment = {**os.environ, "PAGEMILL_KERNEL_CACHE": str(tmp_path / "kernels")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    subprocess.run(["sh", "-c", step], env=environment, cwd=ROOT, check=True, timeout=250)
    served = "from kernels.cpu import extension; print(extension.is_served())"
    without_compiler = {**environment, "CXX": "/nowhere/c++"}
    done = subprocess.run(
        [sys.executable, "-c", served], env=without_compiler, cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "True"
