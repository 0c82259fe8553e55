"""JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelFileInvalid


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises `ModelFileInvalid` if it is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileInvalid(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelFileInvalid(f"{path} holds {type(value).__name__}, not an object.")
    return value
