"""A slot: takes one shard after the other, from the lease to the commit.

Each token of the queue occupies one slot, until no shard is ready. Several slots feed one engine, so that its batch
does not drain at the end of a shard. How many shards that takes depends on their rows, which nobody knows before:

    shard 0   ask ▒▒▒▒▒▒▒▒ answers              A slot begins with the next shard when all rows of the last one are in
    shard 1       ask ▒▒▒▒▒▒▒▒ answers          the engine, and the engine has room for more.
    shard 2                     ask ▒▒▒▒▒▒▒
"""

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from typing import Literal
from uuid import uuid4

from redis.exceptions import RedisError

from jobs.errors import UnreadableJob
from jobs.failpoints import failpoint
from workers.attempt import Attempt
from workers.context import SlotContext
from workers.host import EngineHost

log = logging.getLogger(__name__)

_RETRY_S, _REST_S = 0.5, 15.0
_TRIES_IN_COMPANY = 2
"""A shard that has had more may be what kills its workers."""

Next = Literal["shard", "shard alone", "later", "nothing", "retry", "rest"]
"""What is to follow a turn: the next shard, or one with nothing beside it; the next when one of those in work has
ended; the end, as nothing is ready; a pause, short or long."""


class _Turn:
    """One shard, from its lease to its commit, in a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor, take: Callable[[Callable[[], None]], Next], host: EngineHost) -> None:
        self._host = host
        self.all_asked = False
        self.future = pool.submit(take, self._on_all_asked)
        self.future.add_done_callback(lambda _: host.wake())

    def _on_all_asked(self) -> None:
        self.all_asked = True
        self._host.wake()


def work(model: str, context: SlotContext) -> None:
    """Run shards of a model's jobs until none is ready, or the worker stops."""
    host = context.host
    with ThreadPoolExecutor(context.at_once, thread_name_prefix="shard") as pool:
        turns: list[_Turn] = []
        alone = False

        def may_go_on() -> bool:
            latest = turns[-1]
            room = latest.all_asked and host.has_room and _in_work(turns) < context.at_once
            return room or latest.future.done()

        while not context.stopping.is_set():
            take = partial(_take_turn, model, context, alone=alone, beside_others=_in_work(turns) > 0)
            turns.append(_Turn(pool, take, host))
            host.wait(may_go_on)
            ended = [turn for turn in turns if turn.future.done()]
            turns = [turn for turn in turns if turn not in ended]
            follows = {turn.future.result() for turn in ended}
            alone = "shard alone" in follows
            if "nothing" in follows:
                return
            if "later" in follows and turns:
                wait([turn.future for turn in turns], return_when=FIRST_COMPLETED)
            elif "rest" in follows:
                context.stopping.wait(_REST_S)
            elif "retry" in follows:
                context.stopping.wait(_RETRY_S)


def _in_work(turns: list[_Turn]) -> int:
    return sum(not turn.future.done() for turn in turns)


def _take_turn(
    model: str, context: SlotContext, on_all_asked: Callable[[], None], *, alone: bool, beside_others: bool
) -> Next:
    """Lease a shard and attempt it.

    A shard that may be what kills its workers is in work alone. It waits for that without a lease: a death of this
    worker meanwhile would count as another try of it. What a slot takes beside others leaves each other worker as many
    as this one holds.
    """
    with context.company.join(alone=alone, give_up=context.stopping.is_set) as admitted:
        if not admitted:
            return "nothing"
        try:
            lease = context.ledger.lease(
                model,
                uuid4().hex,
                context.lease_ttl,
                context.share,
                worker=context.worker_id,
                left_to_each=context.heartbeat.holding if beside_others else 0,
            )
            if lease is None:
                return "later" if beside_others else "nothing"
            if lease.tries > _TRIES_IN_COMPANY and not alone:
                context.ledger.give_back(lease)
                return "shard alone"
        except RedisError as error:
            log.warning("cannot lease, the ledger does not answer: %s", error)
            return "retry"
        except UnreadableJob as error:
            # Not at once: it may be its turn again, before another worker has taken it.
            log.error("a shard is left to others: %s", error)
            return "rest"
        failpoint("lease.taken")
        return "shard" if Attempt(lease, context, on_all_asked).run() else "rest"
