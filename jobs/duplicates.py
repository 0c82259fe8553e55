"""Repeated custom_ids in a file of any size: exact, for 8 bytes an id."""

from array import array
from collections import Counter

_PARTS = 256


class IdDigests:
    """The 64-bit hashes of all ids seen. Equal ids have equal hashes, and few others do: those are looked at again.

    The hash is Python's own and salted per process, which does not show: what it selects is compared as text after.
    """

    def __init__(self) -> None:
        # In parts by the low byte, so that looking for repeats needs a set of one part at a time and not of all.
        self._parts = [array("q") for _ in range(_PARTS)]

    def add(self, custom_id: str) -> None:
        digest = hash(custom_id)
        self._parts[digest % _PARTS].append(digest)

    def repeated(self) -> set[int]:
        """The hashes that more than one id has."""
        found: set[int] = set()
        for part in self._parts:
            if len(set(part)) < len(part):
                found.update(digest for digest, times in Counter(part).items() if times > 1)
        return found


class Repeats:
    """Tells the repeats of an id from its first appearance, among the ids whose hash is one of `digests`."""

    def __init__(self, digests: set[int]) -> None:
        self._digests = digests
        self._seen: set[str] = set()

    def is_repeat(self, custom_id: str) -> bool:
        if hash(custom_id) not in self._digests:
            return False
        if custom_id in self._seen:
            return True
        self._seen.add(custom_id)
        return False
