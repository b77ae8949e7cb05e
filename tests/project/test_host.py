"""What containers leave of a host: trees of files as each kind of them shows its control groups."""

import os
from pathlib import Path

import pytest

from ppd_runtime.host import available_cores, free_memory_bytes, memory_bytes

MIB = 2**20
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"
V1_MEMORY = "35 31 0:31 {root} /sys/fs/cgroup/memory rw,relatime master:11 - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
OTHERS = """31 23 0:28 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
36 31 0:35 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
37 31 0:36 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"""
NO_LIMIT = 9223372036854771712
"""As the older version writes it."""


class Tree:
    """A host of 64 cores with 900 MiB free, as far as the files of its control groups go."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 4000000 kB\nMemFree: 100 kB\nMemAvailable: {900 * 1024} kB\n")

    def write(self, path: str, text: object) -> None:
        """A file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def lies(self, groups: str, *mounts: str) -> "Tree":
        """Where the process is, and what is mounted."""
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", "\n".join((OTHERS, *mounts)))
        return self

    def v2(self, group: str, **files: object) -> None:
        """Files of a group of the newer version, by names such as cpu_max."""
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{group}/{name.replace('_', '.', 1)}", text)

    def v1(self, controller: str, group: str, **files: object) -> None:
        """Files of a group of the older version."""
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{controller}/{group}/{name.replace('_', '.', 1)}", text)

    @property
    def free(self) -> float:
        """MiB."""
        return free_memory_bytes(self.root) / MIB


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    return Tree(tmp_path)


def test_without_groups_all_is_the_hosts(tree: Tree, tmp_path: Path) -> None:
    assert (available_cores(tree.root), tree.free) == (64, 900)
    assert memory_bytes(tree.root) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "proc/meminfo").unlink()
    assert tree.free == memory_bytes(tree.root) / MIB


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 64),
        ("200000 100000", 2),
        ("150000 100000", 1),  # half a core is none that a worker can have to itself
        ("50000 100000", 1),
        ("399999 100000", 3),
        ("12800000 100000", 64),
    ],
)
def test_cores_are_the_whole_ones_of_a_quota(tree: Tree, quota: str, cores: int) -> None:
    tree.lies("0::/", V2.format(root="/"))  # in a namespace of its own
    tree.v2("", cpu_max=quota)
    assert available_cores(tree.root) == cores


def test_the_tightest_group_around_this_one_counts(tree: Tree) -> None:
    """As systemd and Kubernetes nest them."""
    tree.lies("0::/kubepods.slice/pod1/main", V2.format(root="/"))
    tree.v2("kubepods.slice", cpu_max="800000 100000", memory_max="max", memory_current=2**40, memory_stat="anon 1")
    tree.v2("kubepods.slice/pod1", cpu_max="300000 100000", memory_max=600 * MIB, memory_current=500 * MIB)
    tree.v2("kubepods.slice/pod1/main", cpu_max="400000 100000", memory_max=500 * MIB, memory_current=100 * MIB)
    assert available_cores(tree.root) == 3
    assert (memory_bytes(tree.root), tree.free) == (500 * MIB, 100)
    tree.v2("kubepods.slice/pod1", memory_stat=f"anon 5\nactive_file {150 * MIB}\ninactive_file {50 * MIB}")
    assert tree.free == 300, "the kernel gives pages of files back"
    tree.v2("kubepods.slice/pod1/main", memory_high=250 * MIB)
    assert (memory_bytes(tree.root), tree.free) == (250 * MIB, 150)
    tree.v2("kubepods.slice/pod1/main", memory_current=700 * MIB)
    assert tree.free == 0


def test_a_neighbours_group_does_not_count(tree: Tree) -> None:
    tree.lies("0::/a/b", V2.format(root="/"))
    tree.v2("a/c", cpu_max="100000 100000", memory_max=MIB, memory_current=1)
    tree.v2("b", cpu_max="100000 100000", memory_max=MIB, memory_current=1)
    assert (available_cores(tree.root), tree.free) == (64, 900)


def test_the_older_version_of_groups(tree: Tree) -> None:
    groups = "11:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/system.slice"
    tree.lies(groups, V1_MEMORY.format(root="/"), V1_CPU.format(root="/"))
    tree.v1("cpu,cpuacct", "docker/abc", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    tree.v1("memory", "docker/abc", memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes=5 * MIB)
    assert (available_cores(tree.root), tree.free) == (64, 900)
    tree.v1("cpu,cpuacct", "docker", cpu_cfs_quota_us=250000, cpu_cfs_period_us=100000)
    kept = f"inactive_file 7\ntotal_inactive_file {40 * MIB}\ntotal_active_file {60 * MIB}"
    tree.v1("memory", "docker", memory_limit_in_bytes=400 * MIB, memory_usage_in_bytes=300 * MIB, memory_stat=kept)
    assert (available_cores(tree.root), memory_bytes(tree.root), tree.free) == (2, 400 * MIB, 200)


def test_an_enclosing_limit_that_a_container_cannot_see_is_told_in_its_own_group(tree: Tree) -> None:
    tree.lies("3:memory:/docker/abc", V1_MEMORY.format(root="/docker/abc"))
    kept = f"hierarchical_memory_limit {300 * MIB}"
    tree.v1("memory", "", memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes=100 * MIB, memory_stat=kept)
    assert (memory_bytes(tree.root), tree.free) == (300 * MIB, 200)


@pytest.mark.parametrize(
    ("group", "root", "found"),
    [
        ("/docker/abc/inner", "/docker/abc", "inner"),  # a container of which the host's paths are told
        ("/docker/abc", "/docker/abc", ""),
        ("/../../abc", "/../..", "abc"),  # the host's tree, seen from a namespace
        ("/", "/docker/abc", ""),  # as some runtimes have it
        ("/elsewhere", "/docker/abc", ""),
    ],
)
def test_groups_are_found_where_they_are_mounted(tree: Tree, group: str, root: str, found: str) -> None:
    tree.lies(f"0::{group}", V2.format(root=root))
    tree.v2(found, cpu_max="200000 100000", memory_max=700 * MIB, memory_current=200 * MIB)
    assert (available_cores(tree.root), tree.free) == (2, 500)


def test_a_group_beyond_the_namespace_is_not_taken_for_another(tree: Tree) -> None:
    tree.lies("0::/../other", V2.format(root="/"))
    tree.v2("", cpu_max="100000 100000")
    tree.write("sys/fs/other/cpu.max", "100000 100000")
    assert available_cores(tree.root) == 64


def test_both_versions_at_once(tree: Tree) -> None:
    """The memory is the older version's, the processor's time the newer one's; a folder's name has a space."""
    mounted = V2.format(root="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/all\\040of\\040them ")
    tree.lies("7:memory:/m\n0::/u", V1_MEMORY.format(root="/"), mounted)
    tree.v2("all of them/u", cpu_max="500000 100000")
    tree.v1("memory", "m", memory_limit_in_bytes=80 * MIB, memory_usage_in_bytes=30 * MIB)
    assert (available_cores(tree.root), tree.free) == (5, 50)


def test_an_affinity_may_be_less_than_the_quota(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    tree.lies("0::/", V2.format(root="/"))
    tree.v2("", cpu_max="800000 100000")
    assert available_cores(tree.root) == 2


@pytest.mark.parametrize("text", ["", "nonsense", "max", "0 0"])
def test_what_cannot_be_read_limits_nothing(tree: Tree, text: str) -> None:
    tree.lies("0::/", V2.format(root="/"))
    tree.v2("", cpu_max=text, memory_max=text, memory_current=text, memory_stat=text)
    assert (available_cores(tree.root), tree.free) == (64, 900)
