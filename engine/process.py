"""The engine in a process of its own, so that a fault of the device or a lack of memory kills it and not its owner.

    submit() ── outbox ── writer thread ══ pipe ══► receiver thread ── inbox ──► main thread: the loop
    futures ◄──────────── reader thread ◄══ pipe ══════════════════════════════ one report for each step

The child is a fresh interpreter, not a fork and not `multiprocessing`'s spawn: it imports the engine and nothing of its
owner's, whatever the owner's main module is, and takes over no locks, threads or signal handlers. It ends by itself
when the pipe does, which the kernel sees to even if the owner is killed. This side needs no torch.
"""

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue

from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError
from engine.info import EngineInfo, EngineStats
from engine.messages import Abort, NewRequest, StepReport, Stop
from engine.outputs import EngineOutput
from engine.pooling.params import PoolingParams
from engine.pooling.prompts import PoolingPrompt
from engine.sampling.params import SamplingParams

# How long a child whose pipe is closed may take to be gone.
_EXIT_GRACE_S = 5.0


class EngineProcess:
    """Starts, feeds and ends one engine process. All methods may be called from any thread.

    `died` is set once the process has ended, for whatever reason; by then every future has its answer or `EngineDied`.
    An ended process is not started again: make a new one.
    """

    _child_main = "engine.process_main"

    def __init__(self, config: EngineConfig) -> None:
        self.died = threading.Event()
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: Future[EngineInfo] = Future()
        self._stats = EngineStats()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._indices = count()
        self._lock = threading.Lock()  # guards what follows
        self._accepting = False
        self._futures: dict[int, Future[EngineOutput]] = {}
        self._index_of: dict[Future[EngineOutput], int] = {}

    def start(self, timeout_s: float = 600) -> EngineInfo:
        """Start the process, and return when the model is loaded.

        Raises the engine's own error if it cannot be loaded (`ModelNotFound`, `ConfigError`, ...), and `EngineDied` if
        the process ends before, or takes longer than `timeout_s`.
        """
        if self._process is not None:
            raise RuntimeError("an EngineProcess is started once")
        ours, theirs = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {self._child_main} import main; main({theirs.fileno()})"
        with _termination_blocked():
            # What libraries print must not end up in the output of a command: stdout goes to stderr.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2
            )
        theirs.close()
        self._accepting = True
        self._outbox.put(pickle.dumps(self._config))
        for target in (self._write, self._read):
            threading.Thread(target=target, args=(ours,), name=f"engine-{target.__name__}", daemon=True).start()
        try:
            return self._loaded.result(timeout_s)
        except TimeoutError:
            self.stop(timeout_s=0)
            raise EngineDied(f"The engine did not load {self._config.model!r} within {timeout_s:g} s.") from None

    def submit(
        self, prompt: PoolingPrompt, params: SamplingParams | PoolingParams, *, lora: str | None = None
    ) -> Future[EngineOutput]:
        """Hand over a request without waiting, and return the future of its output: a
        `RequestOutput`, or a `PoolingOutput` for pooling parameters.

        A request that cannot be served gives an output with `error` set. The future raises `EngineDied` if the process
        ends before it answers, or has ended. Callbacks of the future run on the reader thread and must not block.
        """
        future: Future[EngineOutput] = Future()
        # The request is on its way: `abort` ends it, `Future.cancel` does not.
        future.set_running_or_notify_cancel()
        index = next(self._indices)
        # Here and not in the writer, so that what cannot be pickled raises to whom it concerns.
        message = pickle.dumps(NewRequest(index, prompt, params, lora=lora))
        with self._lock:
            if self._accepting:
                self._futures[index] = future
                self._index_of[future] = index
                self._outbox.put(message)
                return future
        future.set_exception(EngineDied("The engine process is not running."))
        return future

    def abort(self, future: Future[EngineOutput]) -> None:
        """End a request now; its future gets what it has, with finish_reason `abort`. No effect if it has ended."""
        with self._lock:
            index = self._index_of.get(future)
        if index is not None:
            self._outbox.put(pickle.dumps(Abort(index)))

    def stats(self) -> EngineStats:
        """The engine's numbers after its last step; asks nobody."""
        return self._stats

    def stop(self, timeout_s: float = 5) -> None:
        """End the process: asked to, and killed after `timeout_s`. What is in flight gets `EngineDied`. Idempotent."""
        if self._process is None:
            return
        self._outbox.put(pickle.dumps(Stop()))
        if not self.died.wait(timeout_s):
            self._process.kill()
            self.died.wait()

    @property
    def pid(self) -> int | None:
        """The process's id, None before `start`."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and not self.died.is_set()

    def _write(self, connection: Connection) -> None:
        """The writer thread: a child that does not read for a while blocks this thread, and none that submits."""
        while (message := self._outbox.get()) is not None:
            batch = [message]
            while message is not None:
                try:
                    message = self._outbox.get_nowait()
                except Empty:
                    break
                if message is not None:
                    batch.append(message)
            try:
                connection.send(batch)
            except OSError:
                return  # the child is gone; the reader sees it too, and says so
            if message is None:
                return

    def _read(self, connection: Connection) -> None:
        """The reader thread: it ends with the child, and settles everything that is still open then."""
        try:
            while True:
                self._receive(connection.recv())
        except (EOFError, OSError):
            pass  # how a pipe says that its other end is closed
        finally:
            self._settle(connection)

    def _receive(self, message: EngineInfo | EngineError | StepReport) -> None:
        if isinstance(message, EngineInfo):
            self._loaded.set_result(message)
        elif isinstance(message, EngineError):
            self._loaded.set_exception(message)
        else:
            self._stats = message.stats
            for output in message.outputs:
                with self._lock:
                    future = self._futures.pop(output.index)
                    del self._index_of[future]
                future.set_result(output)

    def _settle(self, connection: Connection) -> None:
        assert self._process is not None
        try:
            code = self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._outbox.put(None)
        connection.close()
        died = f"The engine process ended {_reason(code)}"
        with self._lock:
            self._accepting = False
            orphans = list(self._futures.values())
            self._futures.clear()
            self._index_of.clear()
        if not self._loaded.done():
            self._loaded.set_exception(EngineDied(f"{died} while it loaded {self._config.model!r}."))
        for future in orphans:
            future.set_exception(EngineDied(f"{died} with the request in flight."))
        self.died.set()


@contextmanager
def _termination_blocked() -> Iterator[None]:
    """Keeps SIGINT and SIGTERM from a child started herein until it has set up to ignore them: the mask is inherited.

    Both are often sent to the whole process group, and it is the owner who decides what becomes of the engine.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reason(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
