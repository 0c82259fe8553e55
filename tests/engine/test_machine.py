"""What the machine lets a process have, read from made-up control groups."""

import os

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
