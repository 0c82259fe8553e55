"""What this machine lets this process have: memory and cores, inside a container or not.

A container's limits stand in control groups, version 1 or 2; a process is bound by its own group and by all above it.
Files: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
"""

import ctypes
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can still allocate: the least of what the machine and each of its groups has left."""
    # An engine whose options say all sizes runs where psutil is not installed.
    import psutil

    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms(root)])


def usable_cores(root: Path = _ROOT) -> int:
    """Physical cores that this process may keep busy: no more than its affinity mask and its groups' quotas allow."""
    import psutil

    affinity = len(os.sched_getaffinity(0))
    physical = psutil.cpu_count(logical=False) or affinity
    return max(1, min([physical, affinity, *(math.ceil(quota) for quota in _cgroup_cpu_quotas(root))]))


def keep_freed_memory() -> None:
    """Have malloc keep, for the whole process, up to 1 GiB of what is freed. Without effect but with glibc.

    Each step allocates what the last one freed. Given back to the system in between, every page of it costs a fault:
    up to 30,000 in a prefill step of 1,024 tokens, depending on how the heap happens to lie.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    for group in _groups(root, "memory"):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
            if limit is not None and usage is not None:
                # Page cache that nobody uses counts as usage, but the kernel drops it when memory is wanted.
                yield max(0, limit - usage + _read_stat(group / "memory.stat", cache_name))


def _cgroup_cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, "cpu"):
        quota = _read_words(group / "cpu.max") or [
            *_read_words(group / "cpu.cfs_quota_us"),
            *_read_words(group / "cpu.cfs_period_us"),
        ]
        # Without a limit, version 2 says `max` and version 1 says -1.
        if len(quota) == 2 and quota[0].isdigit():
            yield int(quota[0]) / int(quota[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's group and of all above it, for both versions of control groups."""
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.lstrip("/")
        yield group
        # A container may see its own group mounted as the top, under a path that exists only outside.
        yield from (parent for parent in group.parents if parent.is_relative_to(mount))


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # the group has no such controller, or the machine no such version
        return []


def _read_words(path: Path) -> list[str]:
    return [word for line in _read_lines(path) for word in line.split()]


def _read_int(path: Path) -> int | None:
    words = _read_words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _read_stat(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _read_lines(path) if line.split()[0] == name), 0)
