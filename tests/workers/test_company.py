"""Shards in work beside each other, and those that are alone."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from workers.company import Company

WAIT_S = 20


class Member:
    """A shard in a thread of its own, in work until it is told to leave."""

    def __init__(self, company: Company, *, alone: bool = False) -> None:
        self.came, self.waits, self._leave = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(company, alone), daemon=True)
        self._thread.start()

    def _run(self, company: Company, alone: bool) -> None:
        with company.join(alone=alone, give_up=lambda: bool(self.waits.set())) as admitted:
            assert admitted
            self.came.set()
            assert self._leave.wait(WAIT_S)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(WAIT_S)


def test_ordinary_shards_are_in_work_together() -> None:
    company = Company()
    members = [Member(company) for _ in range(3)]
    assert all(member.came.wait(WAIT_S) for member in members)
    for member in members:
        member.leave()


def test_one_that_is_alone_waits_for_those_before_it_and_keeps_off_those_after_it() -> None:
    company = Company()
    before = [Member(company), Member(company)]
    assert all(member.came.wait(WAIT_S) for member in before)
    alone = Member(company, alone=True)
    assert alone.waits.wait(WAIT_S)
    after = [Member(company), Member(company, alone=True)]
    assert all(member.waits.wait(WAIT_S) for member in after)
    before[0].leave()
    assert not alone.came.is_set()
    before[1].leave()
    assert alone.came.wait(WAIT_S)
    assert not any(member.came.is_set() for member in after)
    alone.leave()
    assert after[1].came.wait(WAIT_S)
    assert not after[0].came.is_set()
    after[1].leave()
    assert after[0].came.wait(WAIT_S)
    after[0].leave()


@contextmanager
def in_work(company: Company) -> Iterator[None]:
    member = Member(company)
    assert member.came.wait(WAIT_S)
    yield
    member.leave()


def test_one_that_gives_up_waiting_is_waited_for_by_nobody() -> None:
    company = Company()
    with in_work(company), company.join(alone=True, give_up=lambda: True) as admitted:
        assert not admitted
    for alone in (False, True):
        with company.join(alone=alone, give_up=lambda: True) as admitted:
            assert admitted


def test_those_who_want_to_be_alone_are_so_in_the_order_that_they_came() -> None:
    company = Company()
    admitted = []
    with ExitStack() as before:
        before.enter_context(company.join(alone=False, give_up=lambda: True))

        def there_is_room_and_another_comes() -> bool:
            before.close()
            with company.join(alone=True, give_up=lambda: True) as second:
                admitted.append(second)
            return False

        with company.join(alone=True, give_up=there_is_room_and_another_comes) as first:
            admitted.append(first)
    assert admitted == [False, True]
