"""A TCP proxy that a test sets between a client and a server, and the ways in which a network fails."""

import random
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_CHUNK = 65536


class _Link:
    """One client's connection, and the proxy's own to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.doomed = False
        """The next answer is not delivered: the connection is cut instead."""
        self.reads = False
        """What was asked last is a GET."""

    def cut(self) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class TcpProxy:
    """Passes bytes on, until it is told to do harm. Counts what it did, so that a test sees that it was done.

    `target` is `http://host:port`, `redis://host:port` or `unix:///path`.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._cuts: deque[int] = deque()
        self._doomed: deque[bytes] = deque()
        self._delay_s = 0.0
        self._cut_share, self._random = 0.0, random.Random(0)
        self._holds = b""
        self._came, self._released = threading.Event(), threading.Event()
        self._swallows = self._refuses = False
        self._woken = threading.Event()
        self.connections_cut = self.replies_dropped = self.bytes_swallowed = self.connections_refused = 0
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut_after(self, *sizes: int) -> None:
        """Lets so many bytes of answers pass and cuts that connection; then the same with the next size."""
        with self._lock:
            self._cuts.extend(sizes)

    def cut_all(self) -> None:
        """Cuts every connection that there is."""
        with self._lock:
            links = list(self._links)
            self.connections_cut += len(links)
        for link in links:
            link.cut()

    def drop_reply_to(self, *needles: bytes) -> None:
        """The next request with that in it reaches the server, and its answer does not come back: the connection is
        cut. One request for each needle."""
        with self._lock:
            self._doomed.extend(needles)

    @contextmanager
    def cutting_reads(self, share: float, seed: int) -> Iterator[None]:
        """Of the pieces in which answers to GETs come, that share breaks off at a random byte, and the connection."""
        self._cut_share, self._random = share, random.Random(seed)
        try:
            yield
        finally:
            self._cut_share = 0.0

    @contextmanager
    def holding(self, needle: bytes) -> Iterator[threading.Event]:
        """The next request with that in it reaches the server when the block ends. The event says that it has come."""
        self._came.clear()
        self._released.clear()
        self._holds = needle
        try:
            yield self._came
        finally:
            self._holds = b""
            self._released.set()

    @contextmanager
    def black_hole(self) -> Iterator[None]:
        """Nothing passes, and nobody is told. What connections there are when it ends have lost bytes, and are cut."""
        self._swallows = True
        try:
            yield
        finally:
            self._swallows = False
            self.cut_all()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Connections are cut, and new ones closed at once: the server is down."""
        self._refuses = True
        self.cut_all()
        try:
            yield
        finally:
            self._refuses = False

    @contextmanager
    def delaying(self, seconds: float) -> Iterator[None]:
        """Each piece of an answer comes so much later."""
        self._delay_s = seconds
        try:
            yield
        finally:
            self._delay_s = 0.0

    def close(self) -> None:
        self._woken.set()
        self._released.set()
        self._listener.close()
        self.cut_all()

    def _connect(self) -> socket.socket:
        parts = urlsplit(self._target)
        if parts.scheme == "unix":
            server = socket.socket(socket.AF_UNIX)
            server.connect(parts.path)
            return server
        return socket.create_connection((parts.hostname or "", parts.port or 80))

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                try:
                    if self._refuses:
                        raise ConnectionRefusedError
                    link = _Link(client, self._connect())
                except OSError:
                    self.connections_refused += 1
                    client.close()
                    continue
                with self._lock:
                    self._links.add(link)
                for is_answer in (False, True):
                    threading.Thread(target=self._pump, args=(link, is_answer), daemon=True).start()

    def _pump(self, link: _Link, is_answer: bool) -> None:
        source, sink = (link.server, link.client) if is_answer else (link.client, link.server)
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                if self._swallows:
                    self.bytes_swallowed += len(data)
                elif not is_answer:
                    link.reads = data.startswith(b"GET ")
                    self._doom(link, data)
                    self._hold(data)
                    sink.sendall(data)
                elif not self._answer(link, data):
                    break
        link.cut()
        source.close()
        with self._lock:
            self._links.discard(link)

    def _doom(self, link: _Link, data: bytes) -> None:
        with self._lock:
            for needle in list(self._doomed):
                if needle in data:
                    self._doomed.remove(needle)
                    link.doomed = True
                    return

    def _hold(self, data: bytes) -> None:
        with self._lock:
            if not self._holds or self._holds not in data:
                return
            self._holds = b""
        self._came.set()
        self._released.wait()

    def _answer(self, link: _Link, data: bytes) -> bool:
        """Passes an answer on. False if the connection is to be cut."""
        if link.doomed:
            with self._lock:
                self.replies_dropped += 1
            return False
        if self._delay_s:
            self._woken.wait(self._delay_s)
        passed = self._passed(link, len(data))
        link.client.sendall(data[:passed])
        return passed == len(data)

    def _passed(self, link: _Link, size: int) -> int:
        with self._lock:
            if link.reads and self._random.random() < self._cut_share:
                self.connections_cut += 1
                return self._random.randrange(size)
            if not self._cuts:
                return size
            if self._cuts[0] >= size:
                self._cuts[0] -= size
                return size
            self.connections_cut += 1
            return self._cuts.popleft()


@contextmanager
def tcp_proxy(target: str) -> Iterator[TcpProxy]:
    proxy = TcpProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
