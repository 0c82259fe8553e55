"""What the machine lets a process have, read from made-up control groups."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.machine import available_memory, usable_cores

MIB = 2**20


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000 * MIB}))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return tmp_path


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_control_groups_the_machine_is_the_limit(root):
    assert available_memory(root) == 1000 * MIB
    assert usable_cores(root) == 8


def test_version_2_limits_of_a_group_and_of_those_above_it(root):
    write(
        root,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": f"{10 * MIB}\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/memory.max": f"{400 * MIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{350 * MIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon {1 * MIB}\ninactive_file {70 * MIB}\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
        },
    )
    assert available_memory(root) == 120 * MIB
    assert usable_cores(root) == 3


def test_version_1_limits_in_a_container_that_sees_its_group_as_the_top(root):
    write(
        root,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{300 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{100 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {20 * MIB}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert available_memory(root) == 220 * MIB
    assert usable_cores(root) == 2


def test_version_1_without_a_limit(root):
    write(
        root,
        {
            "proc/self/cgroup": "5:memory:/\n4:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert available_memory(root) == 1000 * MIB
    assert usable_cores(root) == 8


def test_the_affinity_mask_counts(root, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_cores(root) == 1


# 80 MiB in pieces of 4, allocated, written and freed over and over, as steps do with their tensors.
FAULTS = """
from resource import RUSAGE_SELF, getrusage
from engine.machine import keep_freed_memory
if {keeps}:
    keep_freed_memory()
def step():
    pieces = [b"x" * (4 << 20) for _ in range(20)]
for _ in range(3):
    step()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_memory_that_was_freed_is_allocated_again_without_a_page_fault():
    def faults(keeps):
        code = FAULTS.format(keeps=keeps)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults(keeps=True) < faults(keeps=False) / 10
