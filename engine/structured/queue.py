"""Requests that wait for their grammar, while those with one, or without, go on."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from engine.errors import RequestError
from engine.request import Request
from engine.structured.grammar import GrammarCompiler, GrammarMatcher


class GrammarQueue:
    """Holds requests until their grammar is compiled. Not thread-safe: one thread adds, takes and waits."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[int, tuple[Request, Future[GrammarMatcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Compile the grammar of a request that has one; see `take`."""
        structured_output = request.params.structured_output
        assert structured_output is not None
        self._waiting[request.index] = request, self._compiler.compile(structured_output)

    def take(self) -> Iterator[tuple[Request, RequestError | None]]:
        """Let go of the requests whose grammar is done: each with a matcher, or with the error that it ended in."""
        for request, future in [entry for entry in self._waiting.values() if entry[1].done()]:
            del self._waiting[request.index]
            error = future.exception()
            if error is None:
                for sequence in request.sequences:
                    sequence.matcher = future.result().fork()
            elif not isinstance(error, RequestError):
                raise error
            yield request, error

    def wait(self, timeout_s: float) -> None:
        """Return once a grammar is done, or after `timeout_s`, or at once if no request waits."""
        wait([future for _, future in self._waiting.values()], timeout_s, return_when=FIRST_COMPLETED)

    def remove(self, index: int) -> Request | None:
        """Forget a request; None if it does not wait here. Its grammar is compiled for those that come after it."""
        request, _ = self._waiting.pop(index, (None, None))
        return request
