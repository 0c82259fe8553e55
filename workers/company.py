"""Which shards of a worker are in work beside each other: one that may have killed workers has its worker to itself.

A worker that dies takes all its shards with it, and who of them did it is not known. Were the one always retried beside
the others, they would be given up with it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK_S = 0.5


class Company:
    """The shards that are in work: any number of ordinary ones, or a single one that is alone. Thread-safe.

    One that waits to be alone comes before all that come later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._present = 0
        self._is_alone = False
        self._want_to_be_alone: deque[object] = deque()

    @contextmanager
    def join(self, *, alone: bool, give_up: Callable[[], bool]) -> Iterator[bool]:
        """Be in work for the length of the block, once that may be. Yields False if it had to be given up before."""
        place = object() if alone else None
        with self._changed:
            if place is not None:
                self._want_to_be_alone.append(place)
            while (given_up := not self._has_room(place)) and not give_up():
                self._changed.wait(_LOOK_S)
            if place is not None:
                self._want_to_be_alone.remove(place)
            if given_up:
                self._changed.notify_all()
            else:
                self._is_alone = alone
                self._present += 1
        if given_up:
            yield False
            return
        try:
            yield True
        finally:
            with self._changed:
                self._present -= 1
                self._is_alone = False
                self._changed.notify_all()

    def _has_room(self, place: object | None) -> bool:
        """`place` is that in the line of those who want to be alone; None for one who does not."""
        if place is None:
            return not (self._is_alone or self._want_to_be_alone)
        return not self._present and self._want_to_be_alone[0] is place
