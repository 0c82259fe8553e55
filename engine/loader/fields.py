"""Typed fields of a JSON object, with errors that name the field."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelFileInvalid


class Fields:
    """The fields of a JSON object of the file `path`. A field that is null counts as absent.

    The readers raise `ModelFileInvalid` for a field of the wrong type, and for one that is absent and has no default.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileInvalid(f"{self.path}: {name} is {value!r}, not a number.")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise ModelFileInvalid(f"{self.path}: {name} is {value}, not a positive integer.")
        return int(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(x, int | float) for x in value):
            raise ModelFileInvalid(f"{self.path}: {name} is not a list of {count} numbers.")
        return tuple(value)
