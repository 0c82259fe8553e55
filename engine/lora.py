"""LoRA adapters in the engine: which are in memory, in which slots of the device, and who holds them.

    acquire ──► in memory? ── yes ──► held by the request until it ends
                   │ no
                   a slot is free, or its adapter is held by nobody? ── no ──► the request waits for a slot
                   │ yes: the least recently used adapter goes
                   loading, in a thread ──► failed? every request that waits for it gets the error

Younger requests may overtake one that waits for a slot, up to a number of them. After that no request takes hold of an
adapter before this one has a slot, so that one comes free: nobody waits for ever.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.errors import RequestError
from engine.models.adapters import Place
from engine.request import Request
from kernels.lora import StagedFactors

# Reading a file and copying it to the device; more would only compete for the disk and the memory.
_LOADING_THREADS = 2


class FileStamp(NamedTuple):
    """A file as it was when it was read."""

    path: Path
    modified_ns: int
    size: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        status = path.stat()
        return cls(path, status.st_mtime_ns, status.st_size)


class LoadedAdapter(NamedTuple):
    """An adapter that was read, and is not in a slot yet.

    Attributes:
        revision: A digest of the files' contents, 16 bytes: KV blocks are shared only within one revision.
        files: Where it was read from.
        factors: Of the projections that it changes, staged for the device.
    """

    revision: bytes
    files: tuple[FileStamp, ...]
    factors: Mapping[Place, StagedFactors]


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter in memory: its factors are in a slot of `engine.adapter_slots.AdapterSlots`. See `LoadedAdapter`."""

    revision: bytes
    files: tuple[FileStamp, ...]
    slot: int

    @property
    def up_to_date(self) -> bool:
        """Whether its files still are what was read."""
        try:
            return all(FileStamp.of(file.path) == file for file in self.files)
        except OSError:
            return False


class _Load(NamedTuple):
    """An adapter on its way into memory, and the requests that were seen to wait for it."""

    adapter: Future[LoadedAdapter]
    requests: set[Request]


class LoraCache:
    """The adapters in memory, at most `max_loras`, loading ones included. Called from the loop's thread only.

    `load` reads an adapter by its name, in a thread, and raises `RequestError`. `put` puts factors in a slot, numbered
    from 0, after all steps that were launched by then and before all others. At most `max_overtakes` requests take
    hold of an adapter, or begin to wait for its load, while another waits for a slot.
    """

    def __init__(
        self,
        load: Callable[[str], LoadedAdapter],
        put: Callable[[int, Mapping[Place, StagedFactors]], None],
        *,
        max_loras: int,
        max_overtakes: int,
    ) -> None:
        self._load = load
        self._put = put
        self._max_loras = max_loras
        self._max_overtakes = max_overtakes
        self._free_slots = list(reversed(range(max_loras)))
        self._resident: OrderedDict[str, LoraAdapter] = OrderedDict()  # the least recently used first
        self._holders: Counter[str] = Counter()
        self._loading: dict[str, _Load] = {}
        self._waiting_for_slot: Request | None = None
        self._overtakes = 0
        self._threads = ThreadPoolExecutor(_LOADING_THREADS, thread_name_prefix="lora")
        self.num_loads = self.num_evictions = 0

    def acquire(self, request: Request) -> bool:
        """Give `request` hold of its adapter, as `request.adapter`, until `release`.

        False if it has to wait: for a load, which starts now if there is a slot, or for a slot. A request without an
        adapter, or with hold of it, never waits. An adapter whose files have changed is read again once nobody holds
        it.
        """
        name = request.lora
        if name is None or request.adapter is not None:
            return True
        if self._must_let_pass(request):
            return False
        adapter = self._resident.get(name)
        if adapter is not None and not self._holders[name] and not adapter.up_to_date:
            self._evict(name)
            adapter = None
        if adapter is None:
            self._load_or_wait(request, name)
            return False
        self._resident.move_to_end(name)
        self._hold(request, name, adapter)
        self._overtakes += 1
        return True

    def release(self, request: Request) -> None:
        """Forget a request that has ended, whether it has hold of an adapter or not."""
        if request is self._waiting_for_slot:
            self._waiting_for_slot = None
        if request.lora is None:
            return
        if request.adapter is not None:
            self._holders[request.lora] -= 1
        elif request.lora in self._loading:
            self._loading[request.lora].requests.discard(request)

    def take_loaded(self) -> list[tuple[Request, RequestError]]:
        """Give those who wait for an adapter that has been loaded hold of it; return those whose adapter could not be.

        Whoever asks for the same adapter later starts another attempt.
        """
        failed: list[tuple[Request, RequestError]] = []
        for name in [name for name, load in self._loading.items() if load.adapter.done()]:
            load = self._loading.pop(name)
            try:
                loaded = load.adapter.result()
            except RequestError as error:
                failed += [(request, error) for request in load.requests]
                continue
            self.num_loads += 1
            adapter = LoraAdapter(loaded.revision, loaded.files, self._free_slots.pop())
            self._put(adapter.slot, loaded.factors)
            self._resident[name] = adapter
            # At once, lest it be evicted for another before they come to use it, and the two evict each other for ever.
            for request in load.requests:
                self._hold(request, name, adapter)
        return failed

    def wait(self, seconds: float) -> None:
        """Return when a load has ended, or after `seconds`."""
        wait([load.adapter for load in self._loading.values()], timeout=seconds, return_when=FIRST_COMPLETED)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise `RuntimeError` unless `requests`, all that are in the engine, hold what the cache says is held."""
        held = Counter(request.lora for request in requests if request.adapter is not None)
        if held != +self._holders:
            raise RuntimeError("adapter cache: the holders are not the requests that have an adapter")
        if not set(held) <= set(self._resident) or len(self._resident) + len(self._loading) > self._max_loras:
            raise RuntimeError("adapter cache: an adapter that is held is not in memory, or there are too many")
        slots = [*self._free_slots, *(adapter.slot for adapter in self._resident.values())]
        if sorted(slots) != list(range(self._max_loras)):
            raise RuntimeError("adapter cache: a slot is neither free nor of one adapter")

    def _must_let_pass(self, request: Request) -> bool:
        other = self._waiting_for_slot
        return other is not None and other is not request and self._overtakes >= self._max_overtakes

    def _load_or_wait(self, request: Request, name: str) -> None:
        if name not in self._loading:
            if not self._make_room():
                if self._waiting_for_slot is None:
                    self._waiting_for_slot, self._overtakes = request, 0
                return
            if self._waiting_for_slot is not None and self._waiting_for_slot.lora == name:
                self._waiting_for_slot = None
            self._loading[name] = _Load(self._threads.submit(self._load, name), set())
        waiting = self._loading[name].requests
        if request not in waiting:
            waiting.add(request)
            self._overtakes += 1

    def _hold(self, request: Request, name: str, adapter: LoraAdapter) -> None:
        self._holders[name] += 1
        request.adapter = adapter

    def _make_room(self) -> bool:
        if len(self._resident) + len(self._loading) < self._max_loras:
            return True
        unused = next((name for name in self._resident if not self._holders[name]), None)
        if unused is None:
            return False
        self._evict(unused)
        return True

    def _evict(self, name: str) -> None:
        self._free_slots.append(self._resident.pop(name).slot)
        del self._holders[name]
        self.num_evictions += 1
