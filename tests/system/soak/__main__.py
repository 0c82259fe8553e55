"""`make soak`: a fleet, a stream of jobs, and every fault that can be injected at random, for as long as it is told to.

Every job ends in bounded time and is checked when it has ended, and once more at the end of all. The seed decides which
faults and jobs come in which order, not what they meet: processes are as fast as they are.
"""

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.proxy import tcp_proxy
from tests.servers import BUCKET, moto_s3, valkey
from tests.system.fleet import fleet as new_fleet
from tests.system.soak.faults import ACTIONS, OUTAGES
from tests.system.soak.mill import SoakedMill

_CALM_S = 120
"""What the jobs that are left may take when no more faults come."""
_STOP_GRACE_S = 8


@contextmanager
def soaked_mill(folder: Path, rng: random.Random) -> Iterator[SoakedMill]:
    """On files or on a bucket, with a proxy before each server."""
    with ExitStack() as stack:
        # The checker reads the append-only file, which a rewrite would shorten to what is.
        server = stack.enter_context(valkey(folder / "valkey", "--auto-aof-rewrite-percentage", "0"))
        proxies = {"ledger": stack.enter_context(tcp_proxy(server.url.partition("?")[0]))}
        fields = {}
        environment = {"PAGEMILL_STOP_GRACE": str(_STOP_GRACE_S)}
        if rng.random() < 0.5:
            s3 = stack.enter_context(moto_s3())
            proxies["store"] = stack.enter_context(tcp_proxy(s3.endpoint))
            environment["PAGEMILL_S3_ENDPOINT_URL"] = proxies["store"].endpoint
            fields = {"s3": s3, "storage": f"s3://{BUCKET}/soak"}
        redis_url = proxies["ledger"].redis_url
        fleet = new_fleet(folder / "fleet", server, redis_url=redis_url, environment=environment, **fields)
        yield SoakedMill(stack.enter_context(fleet), proxies, rng)


def soak(mill: SoakedMill, seconds: float) -> None:
    """Raises whatever shows that a promise is broken."""
    rng = mill.rng
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(rng.randint(0, 2)):
            mill.submit()
        mill.rest(rng.uniform(0, 1))
        with ExitStack() as stack:
            for fault in rng.sample(ACTIONS, rng.randint(0, 3)) + rng.sample(OUTAGES, rng.randint(0, 1)):
                stack.enter_context(fault(mill))
            mill.rest(rng.uniform(0.1, 3))
        mill.look_after_jobs()
    mill.spared = True
    calm = time.monotonic() + _CALM_S
    while mill.running:
        assert time.monotonic() < calm, f"not ended in {_CALM_S} s without faults: {[r.job.id for r in mill.running]}"
        mill.rest(0.5)
        mill.look_after_jobs()
    for ended in mill.ended:
        mill.check(ended)


def _counts(counter: Counter[str]) -> str:
    return f"{counter.total()} ({', '.join(f'{name} {count}' for name, count in sorted(counter.items()))})"


def _summary(mill: SoakedMill, seed: int, seconds: float) -> str:
    rows = sum(len(ended.job.prompts) for ended in mill.ended)
    slowest = max((ended.took_s for ended in mill.ended), default=0)
    network = Counter(
        {
            f"{name} {what}": count
            for name, proxy in mill.proxies.items()
            for what, count in (
                ("connections cut", proxy.connections_cut),
                ("connections refused", proxy.connections_refused),
                ("replies lost", proxy.replies_dropped),
            )
        }
    )
    return (
        f"seed {seed}, {seconds:.0f} s, jobs {_counts(Counter(ended.state for ended in mill.ended))}, {rows} rows each "
        f"once, slowest job {slowest:.0f} s, exit codes {_counts(mill.exit_codes)}, faults {_counts(mill.faults)}, "
        f"failpoints {_counts(mill.failpoints())}, network {_counts(network)}"
    )


def say(what: str) -> None:
    sys.stdout.write(f"soak: {what}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    say(f"the seed is {seed}")
    folder = Path(tempfile.mkdtemp(prefix="pagemill-soak-"))
    with soaked_mill(folder, random.Random(seed)) as mill:
        try:
            soak(mill, arguments.seconds)
        except Exception:  # noqa: BLE001 - whatever it is, the seed is told
            last = "\n".join(mill.last_faults)
            sys.stderr.write(f"{traceback.format_exc()}soak: the last faults before:\n{last}\n")
            sys.stderr.write(f"soak: FAILED, with the seed {seed}; all that it left is in {folder}\n")
            return 1
        say(_summary(mill, seed, arguments.seconds))
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
