"""An S3 server that misbehaves as a test tells it, and remembers what it was asked."""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.servers import BUCKET, S3Server

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Request(NamedTuple):
    """A request that was answered."""

    method: str
    path: str
    status: int


class FaultyApp:
    """The WSGI application of an S3 server, with faults in front."""

    def __init__(self, app: "WSGIApplication", seed: int) -> None:
        self._app = app
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._refused_share = 0.0
        self._hidden: re.Pattern[bytes] | None = None
        self.requests: list[Request] = []
        self.entries_hidden = 0

    @contextmanager
    def slowing_down(self, share: float) -> Iterator[None]:
        """That share of the requests, drawn at random, is answered with 503 SlowDown, and does nothing."""
        self._refused_share = share
        try:
            yield
        finally:
            self._refused_share = 0.0

    @contextmanager
    def listing_late(self, pattern: bytes) -> Iterator[None]:
        """Listings do not have the entries in which the pattern is found."""
        self._hidden = re.compile(pattern)
        try:
            yield
        finally:
            self._hidden = None

    def statuses(self, method: str, suffix: str) -> list[int]:
        """The answers to such requests for paths that end so, in order."""
        return [it.status for it in self.requests if it.method == method and it.path.endswith(suffix)]

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        with self._lock:
            refuses = self._random.random() < self._refused_share
        status, headers, body = self._refusal(environ) if refuses else self._answer(environ)
        with self._lock:
            request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], int(status.split()[0]))
            self.requests.append(request)
        start_response(status, headers)
        return [body]

    def _refusal(self, environ: "WSGIEnvironment") -> tuple[str, list[tuple[str, str]], bytes]:
        # What is not read would be taken for the next request of the connection.
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        return (
            "503 Slow Down",
            [("Content-Type", "application/xml"), ("Content-Length", str(len(_SLOW_DOWN)))],
            _SLOW_DOWN,
        )

    def _answer(self, environ: "WSGIEnvironment") -> tuple[str, list[tuple[str, str]], bytes]:
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start(status: str, headers: list[tuple[str, str]], *_: object) -> object:
            started.append((status, headers))
            return lambda data: None

        body = b"".join(self._app(environ, start))
        status, headers = started[-1]
        if self._hidden is not None and "list-type=2" in environ["QUERY_STRING"]:
            shown = _ENTRY.sub(self._shown, body)
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
            return status, [*headers, ("Content-Length", str(len(shown)))], shown
        return status, headers, body

    def _shown(self, entry: re.Match[bytes]) -> bytes:
        if self._hidden is None or not self._hidden.search(entry.group()):
            return entry.group()
        self.entries_hidden += 1
        return b""


class FaultyS3(NamedTuple):
    """Where it is, and what makes it misbehave."""

    server: S3Server
    app: FaultyApp


@contextmanager
def faulty_s3(seed: int) -> Iterator[FaultyS3]:
    """Moto's S3 behind a `FaultyApp`, with the bucket `BUCKET` in it. Moto keeps its objects for the whole process."""
    app = FaultyApp(DomainDispatcherApplication(create_backend_app), seed)
    listener = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        server = S3Server(f"http://127.0.0.1:{listener.server_port}")
        server.client().create_bucket(Bucket=BUCKET)
        app.requests.clear()
        yield FaultyS3(server, app)
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
