"""How values cross the pipe between an engine process and its owner."""

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def packed(cls: T) -> T:
    """Lets the instances of a dataclass of two or more fields be pickled as a call of it with those.

    A frozen one with slots would be pickled, and above all unpickled, field by field in Python: that takes twice as
    long, and there are three such objects for each request.
    """
    values = attrgetter(*(field.name for field in fields(cls)))

    def reduce(value: Any) -> tuple[type, Any]:
        return cls, values(value)

    cls.__reduce__ = reduce  # type: ignore[assignment, method-assign]
    return cls
