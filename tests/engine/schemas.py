"""JSON Schemas of all the kinds that people write. What they allow is short, so that every answer comes to its end."""

import random
from typing import Any
from urllib.parse import quote

_NAMES = ("name", "größe", "名前", "emoji 🙂", "created_at", "is-active", "a", "x.y", "tags", 'quote"d', "ключ")
_PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(foo|ba+r){1,3}$", "^[^a-z]{1,4}$", "^é+x?$", r"^\d{4}/\d{2}$")
_LITERALS = ("yes", "no", "vielleicht", "はい", "🙂", 0, 7, -1.5, True, None, "back\\slash", 'a "quote"')


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` schemas, each of an object with a name of its own, so that no two are equal."""
    return [_Maker(random.Random(f"{seed}:{index}")).document(index) for index in range(count)]


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def document(self, index: int) -> dict[str, Any]:
        names = ("item", "näher")
        properties = {f"row{index}": {"const": index}, **self._properties(2)}
        properties["ref"] = {"$ref": f"#/$defs/{quote(self._rng.choice(names))}"}
        if self._rng.random() < 0.5:
            properties["refs"] = {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$defs": {name: self._object(0) for name in names},
            **self._closed(properties),
        }

    def _closed(self, properties: dict[str, Any]) -> dict[str, Any]:
        required = [name for name in properties if self._rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _properties(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(_NAMES, self._rng.randint(1, 4))
        return {name: self._value(depth) for name in names}

    def _object(self, depth: int) -> dict[str, Any]:
        return self._closed(self._properties(depth))

    def _value(self, depth: int) -> dict[str, Any]:
        leaves = [self._string, self._pattern, self._integer, self._number, self._enum, self._const, self._nullable]
        branches = [lambda: self._object(depth - 1), lambda: self._array(depth - 1), lambda: self._any_of(depth - 1)]
        return self._rng.choice(leaves + 2 * branches if depth else leaves)()

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._rng.randint(0, 2)
        items = {"minItems": least, "maxItems": least + self._rng.randint(0, 2)}
        return {"type": "array", "items": self._value(depth), **items}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth), {"type": "null"}, self._integer()]}

    def _string(self) -> dict[str, Any]:
        return {"type": "string", "minLength": self._rng.randint(0, 2), "maxLength": self._rng.randint(2, 8)}

    def _pattern(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self._rng.choice(_PATTERNS), "maxLength": 12}

    def _integer(self) -> dict[str, Any]:
        least = self._rng.randint(-200, 200)
        return {"type": "integer", "minimum": least, "maximum": least + self._rng.randint(0, 1000)}

    def _number(self) -> dict[str, Any]:
        least = self._rng.randint(-50, 50)
        return {"type": "number", "exclusiveMinimum": least, "maximum": least + 2.5}

    def _enum(self) -> dict[str, Any]:
        return {"enum": self._rng.sample(_LITERALS, self._rng.randint(1, 4))}

    def _const(self) -> dict[str, Any]:
        return {"const": self._rng.choice([*_LITERALS, {"k": [1, "é"]}])}

    def _nullable(self) -> dict[str, Any]:
        return {"type": [self._rng.choice(["string", "integer"]), "null"], "maxLength": 5, "minimum": 0, "maximum": 99}
