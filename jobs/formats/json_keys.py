"""Keys that stand twice in a JSON object: parsers keep one of the two in silence, and not all the same one."""

import json
from typing import Any

_SPACE = b" \t\r\n"
"""What may stand between a key and its colon."""


class _Repeated(Exception):
    """The object has this key twice."""


def repeated_key(data: bytes, keys: int) -> str | None:
    """A key that an object in the JSON text `data` has twice; None where all differ. `keys` were kept of it in all.

    Every key has a colon: where there are no more colons than keys were kept, none was lost. Where strings hold
    colons too, only those are counted that follow a quote, and only where even those are too many is it parsed again.
    """
    if data.count(b":") == keys or data.translate(None, _SPACE).count(b'":') == keys:
        return None
    try:
        json.loads(data, object_pairs_hook=_as_dict)
    except _Repeated as repeated:
        return str(repeated.args[0])
    return None


def count_keys(value: Any) -> int:
    """The keys of all objects in a parsed value."""
    count = 0
    boxes = [value] if type(value) is dict or type(value) is list else []
    for box in boxes:  # grows as it is gone through
        if type(box) is dict:
            count += len(box)
        items = box.values() if type(box) is dict else box
        boxes += [item for item in items if type(item) is dict or type(item) is list]
    return count


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for place, name in enumerate(names) if name in names[:place]))
    return found
