"""Keys that stand twice in a JSON object: parsers keep one of the two in silence, and not all the same one."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

_SPACE = b" \t\r\n"
"""What may stand between a key and its colon."""


class Kept(NamedTuple):
    """Of a JSON text, the keys that its objects have, and the strings that are no keys."""

    keys: int
    texts: int


class _Repeated(Exception):
    """The object has this key twice."""


def repeated_key(data: bytes, keys: int, texts: int) -> str | None:
    """A key that an object in the JSON text `data` has twice; None where all differ.

    `keys` were kept of it when it was parsed, and `texts` strings beside them.

    A key is a string in two quotes, and a colon follows it: where there are no more quotes than those of the strings
    that were kept, or no more colons than keys, none was lost. Where strings hold both, only the colons are counted
    that follow a quote, and only where even those are too many is it parsed again.
    """
    if data.count(b'"') == 2 * (keys + texts) or data.count(b":") == keys:
        return None
    if data.translate(None, _SPACE).count(b'":') == keys:
        return None
    try:
        json.loads(data, object_pairs_hook=_as_dict)
    except _Repeated as repeated:
        return str(repeated.args[0])
    return None


def count_kept(value: Any) -> Kept:
    """The keys and the strings in a parsed value."""
    keys = texts = 0
    boxes: list[Any] = [[value]]
    for box in boxes:  # grows as it is gone through
        items: Iterable[Any] = box
        if type(box) is dict:
            keys += len(box)
            items = box.values()
        for item in items:
            if type(item) is str:
                texts += 1
            elif type(item) is dict or type(item) is list:
                boxes.append(item)
    return Kept(keys, texts)


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for place, name in enumerate(names) if name in names[:place]))
    return found
