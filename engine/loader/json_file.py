"""JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelFileInvalid


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises `ModelFileInvalid` if it is anything else."""
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelFileInvalid(f"{path} holds {type(value).__name__}, not an object.")
    return value


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """Return the JSON array of objects in `path`. Raises `ModelFileInvalid` if it is anything else."""
    value = _read(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelFileInvalid(f"{path} holds something else than a list of objects.")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileInvalid(f"{path} cannot be read as JSON ({error}).") from error
