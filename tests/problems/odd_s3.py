"""Moto's S3 behind a gate that has the habits of stores which are not AWS."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.servers import BUCKET, S3Server

Environ = dict[str, Any]
Habit = Callable[[Environ], bool]
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"


class OddS3:
    """Counts the requests in which a habit showed. A habit is told by what requests it is for."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.refuses: Habit = lambda _: False
        """Answered as not implemented, and not done."""
        self.forgets_condition: Habit = lambda _: False
        """Done whatever is there, `If-None-Match` or not."""
        self.fails_late: Habit = lambda _: False
        """Done, and answered as a fault of the server: once for each path."""
        self.seen: Counter[str] = Counter()
        self._failed: set[str] = set()
        self.server = S3Server("")

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.refuses(environ):
            self.seen["refused"] += 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _error(start_response, "501 Not Implemented", "NotImplemented")
        if "HTTP_IF_NONE_MATCH" in environ and self.forgets_condition(environ):
            self.seen["forgotten"] += 1
            del environ["HTTP_IF_NONE_MATCH"]
        path = environ["PATH_INFO"]
        if path in self._failed or not self.fails_late(environ):
            return self._moto(environ, start_response)
        self.seen["failed late"] += 1
        self._failed.add(path)
        list(self._moto(environ, lambda *_: None))
        return _error(start_response, "500 Internal Server Error", "InternalError")


def _error(start_response: Callable[..., Any], status: str, code: str) -> list[bytes]:
    body = _ERROR.format(code=code, message=status).encode()
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


@contextmanager
def odd_s3() -> Iterator[OddS3]:
    """A server without any habit yet, with the bucket `BUCKET` in it."""
    odd = OddS3()
    http = make_server("127.0.0.1", 0, odd, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        odd.server = S3Server(f"http://127.0.0.1:{http.server_port}")
        odd.server.client().create_bucket(Bucket=BUCKET)
        yield odd
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
