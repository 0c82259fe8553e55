"""Which request starts next: the scheduler admits in this order, whatever policy makes it.

`fcfs` is the order of arrival. `prefix` uses that a batch job is known long before it runs:

- of requests that differ in priority, the highest comes first;
- prompts that begin alike start together, so that what they share is in the cache when they need it and can be evicted
  when the last of them has started (the order is depth first through `engine.prefix_tree`; SGLang's `dfs-weight` and
  BatchLLM, arXiv 2412.03594, do it too);
- of what is equal in that, the request that will probably generate longest comes first, so that the last steps of a job
  are not those of one long answer, and prompts with short answers are computed beside those that generate.

A request is passed by `MAX_OVERTAKES` others at most: then it is the next.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple, Protocol

from engine.blocks import BlockHash, block_hash, root_hash
from engine.prefix_tree import Leaf, PrefixTree
from engine.request import Request

# How far the order looks ahead. The prompts of so many requests are encoded and in memory: at some 50 bytes a token.
# Compiled grammars are larger: with a batch of them waiting, it looks no further.
LOOKAHEAD_REQUESTS = 8192
LOOKAHEAD_TOKENS = 2**21
MAX_OVERTAKES = 2 * LOOKAHEAD_REQUESTS


class WaitingRequests(Protocol):
    """Requests that have not started yet."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def num_wanted(self) -> int:
        """How many more of them would be looked at; below 0: none."""
        ...

    def add(self, request: Request) -> None: ...

    def take(self) -> Request:
        """Remove the next one; there must be one."""
        ...

    def remove(self, request: Request) -> None:
        """Take one out if it is in."""
        ...


class ArrivalOrder:
    """First come, first served; looks `lookahead` requests ahead."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def num_wanted(self) -> int:
        return self._lookahead - len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.index] = request

    def take(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        self._requests.pop(request.index, None)


class _Place(NamedTuple):
    """Where a request waits, and how many are taken when it has waited for enough of them."""

    leaf: Leaf[Request]
    due: int


class PrefixOrder:
    """By priority, by prefix, and the likely longest first; see above.

    Args:
        lookahead: How many requests it wants to know at least, however long they are.
        block_size: Tokens in a block; 0 if no blocks are shared, so that there are no prefixes to go by.
        predict: How many tokens a request will generate, as far as that can be said.
        max_overtakes: How many requests may start between the arrival of one and its start, while it could.
    """

    def __init__(
        self,
        lookahead: int,
        block_size: int,
        predict: Callable[[Request], int],
        max_overtakes: int = MAX_OVERTAKES,
    ) -> None:
        self._lookahead = lookahead
        self._block_size = block_size
        self._predict = predict
        self._max_overtakes = max_overtakes
        self._trees: defaultdict[int, PrefixTree[Request]] = defaultdict(PrefixTree)  # by priority
        self._places: OrderedDict[int, _Place] = OrderedDict()  # by index, the oldest first
        self._num_tokens = self._num_grammars = self._num_added = self._num_taken = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return (place.leaf.value for place in self._places.values())

    @property
    def num_wanted(self) -> int:
        is_light = self._num_tokens < LOOKAHEAD_TOKENS and self._num_grammars < self._lookahead
        return max(LOOKAHEAD_REQUESTS if is_light else 0, self._lookahead) - len(self)

    def add(self, request: Request) -> None:
        """Put a request in its place. How long it will be is judged now, to within a factor of two."""
        rank = (-self._predict(request).bit_length(), self._num_added)
        leaf = Leaf(request, self._block_hashes(request), rank)
        self._num_added += 1
        self._num_tokens += request.num_prompt_tokens
        self._num_grammars += _has_grammar(request)
        self._places[request.index] = _Place(leaf, self._num_taken + self._max_overtakes)
        self._trees[request.priority].add(leaf)

    def take(self) -> Request:
        oldest = next(iter(self._places.values()))
        if self._num_taken >= oldest.due:
            request = oldest.leaf.value
            self._trees[request.priority].remove(oldest.leaf)
        else:
            request = self._trees[max(priority for priority, tree in self._trees.items() if len(tree))].take()
        self._num_taken += 1
        self._forget(request)
        return request

    def remove(self, request: Request) -> None:
        if place := self._places.get(request.index):
            self._trees[request.priority].remove(place.leaf)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._places[request.index]
        self._num_tokens -= request.num_prompt_tokens
        self._num_grammars -= _has_grammar(request)

    def _block_hashes(self, request: Request) -> list[BlockHash]:
        """Of the prompt's blocks that could be found in the cache: not the last token's."""
        if not self._block_size:
            return []
        count = (request.num_prompt_tokens - 1) // self._block_size
        if request.lora is None:
            return request.sequences[0].block_hashes(self._block_size, count)
        # Which revision of the adapter it will be, and with it the blocks' own names, shows when the adapter is loaded.
        hashes = [
            root_hash(request.salt, blake2b(request.lora.encode(errors="surrogatepass"), digest_size=16).digest())
        ]
        for start in range(0, count * self._block_size, self._block_size):
            hashes.append(block_hash(hashes[-1], request.prompt_token_ids[start : start + self._block_size]))
        return hashes


def _has_grammar(request: Request) -> bool:
    return request.sequences[0].matcher is not None
