"""The engine in a process of its own, so that a fault of the device or a lack of memory kills it and not its owner.

    submit() ──── outbox ── writer thread ══ pipe ══► receiver thread ── inbox ──► main thread: the loop
    on_start()   ◄───────── reader thread ◄══ pipe ══════════════════════════════ what a step begins with
    on_outputs() ◄──────────────┘                                                 one report after each step

The child is a fresh interpreter, not a fork and not `multiprocessing`'s spawn: it imports the engine and nothing of its
owner's, whatever the owner's main module is, and takes over no locks, threads or signal handlers. It ends by itself
when the pipe does, which the kernel sees to even if the owner is killed. This side needs no torch.
"""

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue

from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError
from engine.info import EngineInfo, EngineStats
from engine.messages import Abort, NewRequest, Started, StepReport, Stop
from engine.outputs import EngineOutput

# How long a child whose pipe is closed may take to be gone.
_EXIT_GRACE_S = 5.0


class EngineProcess:
    """Starts, feeds and ends one engine process. All methods may be called from any thread.

    `on_outputs` is given what each step finished, and `on_start`, before a step, the indices of the requests that start
    in it: not in the order in which they were submitted. Both are called on the reader thread and must not block.
    `died` is set once the process has ended, for whatever reason: by then `on_outputs` has had all outputs that there
    will be, and `death` says why. An ended process is not started again: make a new one.
    """

    _child_main = "engine.process_main"

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[list[EngineOutput]], None],
        on_start: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.died = threading.Event()
        self.death: EngineDied | None = None
        self._config = config
        self._on_outputs = on_outputs
        self._on_start = on_start
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: Future[EngineInfo] = Future()
        self._stats = EngineStats()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()

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
        self._outbox.put(pickle.dumps(self._config))
        for target in (self._write, self._read):
            threading.Thread(target=target, args=(ours,), name=f"engine-{target.__name__}", daemon=True).start()
        try:
            return self._loaded.result(timeout_s)
        except TimeoutError:
            self.stop(timeout_s=0)
            raise EngineDied(f"The engine did not load {self._config.model!r} within {timeout_s:g} s.") from None

    def submit(self, requests: Sequence[NewRequest]) -> None:
        """Hand over requests without waiting. Each is answered by one output with its index: a `RequestOutput`, or a
        `PoolingOutput` for pooling parameters.

        A request that cannot be served gives an output with `error` set. None is answered after the process has ended.
        """
        # Here and not in the writer, so that what cannot be pickled raises to whom it concerns.
        self._outbox.put(pickle.dumps(list(requests)))

    def abort(self, indices: Sequence[int]) -> None:
        """End requests now; their outputs have what there is, with finish_reason `abort`. No effect on ended ones."""
        self._outbox.put(pickle.dumps(Abort(tuple(indices))))

    def stats(self) -> EngineStats:
        """The engine's numbers after its last step; asks nobody."""
        return self._stats

    def stop(self, timeout_s: float = 5) -> None:
        """End the process: asked to, and killed after `timeout_s`. What is in flight is lost. Idempotent."""
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
        """The reader thread: it ends with the child."""
        try:
            while True:
                self._receive(connection.recv())
        except (EOFError, OSError):
            pass  # how a pipe says that its other end is closed
        finally:
            self._settle(connection)

    def _receive(self, message: EngineInfo | EngineError | Started | StepReport) -> None:
        if isinstance(message, EngineInfo):
            self._loaded.set_result(message)
        elif isinstance(message, EngineError):
            self._loaded.set_exception(message)
        elif isinstance(message, Started):
            self._on_start(message.indices)
        else:
            self._stats = message.stats
            if message.outputs:
                self._on_outputs(message.outputs)

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
        if not self._loaded.done():
            self._loaded.set_exception(EngineDied(f"{died} while it loaded {self._config.model!r}."))
        self.death = EngineDied(f"{died}.")
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
