"""llama.cpp on a CPU, by llama-cpp-python's bindings to its C interface, batched as llama.cpp's own server does.

A slot is a sequence of the context. In each call of `llama_decode` every slot that generates has its next token, and
the prompts of those that do not yet fill the rest of the batch; a slot whose answer is complete takes the next row.
What all rows begin with is computed once and lent to every slot with `llama_memory_seq_cp`.
"""

from collections import deque
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any

import llama_cpp
import numpy as np

# vLLM's adapter has the same length.
_LONGEST = 2048
_PREFIX_SEQUENCE = 0
# Below, attention through the keys and values of all slots costs more than what is computed again.
_SHORTEST_PREFIX = 32


def load(model: str, threads: int, options: dict[str, Any]) -> Any:
    """Load a GGUF file; `options`: `slots`, and fields of `llama_context_params`."""
    slots, fields = options["slots"], {name: value for name, value in options.items() if name != "slots"}
    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    if not loaded:
        raise ValueError(f"llama.cpp cannot load {model}")
    # Its manual's advice: one buffer of keys and values for all sequences where they share a large prefix, and
    # otherwise one for each, since attention goes through all of a buffer.
    apart, together = (_Context(loaded, slots, threads, {"kv_unified": unified, **fields}) for unified in (False, True))

    def generate(rows: list[dict[str, Any]]) -> list[list[int]]:
        shared = _common_prefix([row["prompt"] for row in rows])
        return together.generate(rows, shared) if shared else apart.generate(rows, [])

    return generate


def versions() -> dict[str, str]:
    return {"llama-cpp-python": llama_cpp.__version__}


def _common_prefix(prompts: list[list[int]]) -> list[int]:
    """What all prompts begin with, if that is worth it; never all of one, whose last token's logits are wanted."""
    if len(prompts) < 2:
        return []
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    common = [column[0] for column in columns][: min(map(len, prompts)) - 1]
    return common if len(common) >= _SHORTEST_PREFIX else []


class _Slot:
    """A sequence of the context at work on a row: `pending` are the tokens that are not in the KV cache yet."""

    def __init__(self, sequence: int, place: int, row: dict[str, Any], position: int) -> None:
        self.sequence = sequence
        self.place = place
        self.pending = row["prompt"][position:]
        self.position = position
        self.missing = row["new_tokens"]


class _Context:
    """A `llama_context` with a batch to fill. Raises `RuntimeError` where llama.cpp refuses."""

    def __init__(self, model: Any, slots: int, threads: int, fields: dict[str, Any]) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = slots + 1
        params.n_ctx = params.n_seq_max * _LONGEST
        params.n_threads = params.n_threads_batch = threads
        for name, value in fields.items():
            setattr(params, name, value)
        self._slots = slots
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context with {fields}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._batch_size = params.n_batch

    def generate(self, rows: list[dict[str, Any]], shared: list[int]) -> list[list[int]]:
        """Answer the rows, which all begin with `shared`."""
        llama_cpp.llama_memory_clear(self._memory, False)
        for start in range(0, len(shared), self._batch_size):
            self._batch.n_tokens = 0
            self._add(_PREFIX_SEQUENCE, shared[start : start + self._batch_size], start, wants_logits=False)
            self._decode()
        answers: list[list[int]] = [[] for _ in rows]
        waiting = deque(enumerate(rows))
        free = list(range(1, self._slots + 1))
        busy: list[_Slot] = []
        while waiting or busy:
            while waiting and free:
                busy.append(self._start(heappop(free), *waiting.popleft(), len(shared)))
            for slot, token in self._step(busy):
                answers[slot.place].append(token)
                slot.pending = [token]
                slot.missing -= 1
                if not slot.missing:
                    llama_cpp.llama_memory_seq_rm(self._memory, slot.sequence, -1, -1)
                    heappush(free, slot.sequence)
            busy = [slot for slot in busy if slot.missing]
        return answers

    def _start(self, sequence: int, place: int, row: dict[str, Any], num_shared: int) -> _Slot:
        if num_shared:
            llama_cpp.llama_memory_seq_cp(self._memory, _PREFIX_SEQUENCE, sequence, 0, num_shared)
        return _Slot(sequence, place, row, num_shared)

    def _step(self, busy: list[_Slot]) -> list[tuple[_Slot, int]]:
        """Compute a batch, and return the slots that have a new token, the likeliest."""
        self._batch.n_tokens = 0
        sampled = []
        # One token of each at least: no prompt keeps those waiting that generate.
        room = self._batch_size - len(busy)
        # With a buffer for each sequence, llama.cpp computes those together whose numbers follow one another.
        for slot in sorted(busy, key=lambda slot: slot.sequence):
            count = 1 + min(len(slot.pending) - 1, room)
            room -= count - 1
            tokens, slot.pending = slot.pending[:count], slot.pending[count:]
            wants_logits = not slot.pending
            self._add(slot.sequence, tokens, slot.position, wants_logits=wants_logits)
            slot.position += len(tokens)
            if wants_logits:
                sampled.append(slot)
        self._decode()
        if not sampled:
            return []
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(len(sampled), self._num_vocab))
        return list(zip(sampled, logits.argmax(axis=1).tolist(), strict=True))

    def _add(self, sequence: int, tokens: list[int], position: int, *, wants_logits: bool) -> None:
        """Put tokens of a sequence into the batch; `wants_logits`: those after the last of them."""
        batch = self._batch
        for index, token in enumerate(tokens, start=batch.n_tokens):
            batch.token[index] = token
            batch.pos[index] = position + index - batch.n_tokens
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = False
        batch.n_tokens += len(tokens)
        if wants_logits:
            batch.logits[batch.n_tokens - 1] = True

    def _decode(self) -> None:
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {status}")
