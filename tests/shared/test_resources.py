"""Memory and cores within control groups: made-up trees of each kind, and a real group where one can be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shared import resources
from shared.resources import core_room, free_memory, memory_room, usable_cores, visible_cores

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712
"""What version 1 shows where there is none."""


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "visible_cores", lambda: 8)


class Tree:
    """A made-up file system: 32 GiB available, and the control groups that a test puts into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {32 * GIB // 1024} kB\n")
        self._mounts: list[str] = []

    def we_are_in(self, *lines: str) -> None:
        (self.root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")

    def mount(self, point: str, seen: str = "/", controllers: str | None = None) -> None:
        """A hierarchy at a folder: version 1's with these controllers, or version 2's."""
        kind, options = ("cgroup2", "rw") if controllers is None else ("cgroup", f"rw,{controllers}")
        self._mounts.append(f"35 31 0:32 {seen} {point} rw,relatime shared:9 - {kind} cgroup {options}")
        (self.root / "proc/self/mountinfo").write_text("\n".join(["22 1 8:1 / / rw - ext4 /dev/sda rw", *self._mounts]))

    def group(self, path: str, **files: Any) -> None:
        """Files by their names, with __ for the dot."""
        folder = self.root / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    @property
    def memory(self) -> tuple[float, str]:
        return self._named(memory_room(self.root))

    @property
    def cores(self) -> tuple[float, str]:
        return self._named(core_room(self.root))

    def _named(self, room: resources.Room) -> tuple[float, str]:
        return room.amount, "" if room.group is None else f"/{room.group.relative_to(self.root)}"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_control_groups_the_machine_is_the_limit(tree: Tree) -> None:
    assert (tree.memory, tree.cores) == ((32 * GIB, ""), (8, ""))
    assert 0 < free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 <= usable_cores() <= 8
    assert visible_cores() >= 1


def test_version_2_the_units_own_group_and_its_slice_bound(tree: Tree) -> None:
    tree.we_are_in("0::/yard.slice/tokenyard.service")
    tree.mount("/sys/fs/cgroup")
    tree.group("/sys/fs/cgroup", memory__stat="anon 9")  # the root has no limits
    unit, above = "/sys/fs/cgroup/yard.slice/tokenyard.service", "/sys/fs/cgroup/yard.slice"
    tree.group(above, memory__max=8 * GIB, memory__current=GIB, cpu__max="150000 100000")
    tree.group(unit, memory__max="max", memory__current=GIB, cpu__max="max 100000")
    assert (tree.memory, tree.cores) == ((7 * GIB, above), (2, above))
    tree.group(unit, memory__max=2 * GIB, cpu__max="100000 100000")
    assert (tree.memory, tree.cores) == ((GIB, unit), (1, unit))
    tree.group(above, memory__max=GIB // 2)  # less than what is used: nothing is left
    assert tree.memory == (0, above)


def test_version_2_slows_down_before_it_kills(tree: Tree) -> None:
    tree.we_are_in("0::/a")
    tree.mount("/sys/fs/cgroup")
    tree.group("/sys/fs/cgroup/a", memory__max=8 * GIB, memory__high=4 * GIB, memory__current=GIB)
    assert tree.memory[0] == 3 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_do_not_count(tree: Tree, version: int) -> None:
    if version == 2:
        tree.we_are_in("0::/a")
        tree.mount("/sys/fs/cgroup")
        statistics = f"anon 5\ninactive_file {GIB // 2}\nactive_file {GIB // 2}"
        tree.group("/sys/fs/cgroup/a", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=statistics)
    else:
        tree.we_are_in("4:memory:/a")
        tree.mount("/sys/fs/cgroup/memory", controllers="memory")
        statistics = f"inactive_file 7\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 2}"
        files: dict[str, Any] = {"memory__limit_in_bytes": 4 * GIB, "memory__usage_in_bytes": 3 * GIB}
        tree.group("/sys/fs/cgroup/memory/a", **files, memory__stat=statistics)
    assert tree.memory[0] == 2 * GIB


def test_version_1_has_a_tree_for_each_controller(tree: Tree) -> None:
    tree.we_are_in("5:memory:/yard/one", "3:cpu,cpuacct:/other", "1:name=systemd:/x", "0::/")
    tree.mount("/sys/fs/cgroup/memory", controllers="memory")
    tree.mount("/sys/fs/cgroup/cpu,cpuacct", controllers="cpu,cpuacct")
    yard, other = "/sys/fs/cgroup/memory/yard", "/sys/fs/cgroup/cpu,cpuacct/other"
    tree.group(f"{yard}/one", memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes=GIB)
    tree.group(yard, memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    tree.group(other, cpu__cfs_quota_us=300_000, cpu__cfs_period_us=100_000)
    tree.group("/sys/fs/cgroup/cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert (tree.memory, tree.cores) == ((GIB, yard), (3, other))


def test_both_versions_together(tree: Tree) -> None:
    """systemd's hybrid: the controllers are version 1's, and version 2 stands beside them without any."""
    tree.we_are_in("5:memory:/unit", "0::/unit")
    tree.mount("/sys/fs/cgroup/unified")
    tree.mount("/sys/fs/cgroup/memory", controllers="memory")
    tree.group("/sys/fs/cgroup/unified/unit", cgroup__procs="1")
    tree.group("/sys/fs/cgroup/memory/unit", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=0)
    assert tree.memory == (2 * GIB, "/sys/fs/cgroup/memory/unit")


@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/1f", "/docker/1f"),  # none, and its own group is what is mounted
        ("/docker/1f/inner", "/docker/1f"),
        ("/docker/1f", "/docker/2e"),  # another part of the tree is what is mounted
        ("/../other", "/"),  # moved out of its namespace
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_within_containers(tree: Tree, own: str, seen: str, version: int) -> None:
    point = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
    tree.we_are_in(f"5:memory:{own}" if version == 1 else f"0::{own}")
    tree.mount(point, seen, "memory" if version == 1 else None)
    names = ("memory__limit_in_bytes", "memory__usage_in_bytes") if version == 1 else ("memory__max", "memory__current")
    tree.group(point, **dict(zip(names, (3 * GIB, GIB), strict=True)))
    assert tree.memory == (2 * GIB, point)


def test_of_mounts_over_each_other_the_one_on_top_counts(tree: Tree) -> None:
    tree.we_are_in("5:memory:/unit")
    tree.mount("/sys/fs/cgroup/memory", controllers="memory")
    tree.mount("/sys/fs/cgroup/memory", "/unit", "memory")
    tree.group("/sys/fs/cgroup/memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=0)
    tree.group("/sys/fs/cgroup/memory/unit", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)  # of somebody else
    assert tree.memory == (2 * GIB, "/sys/fs/cgroup/memory")


def test_a_folder_with_a_space(tree: Tree) -> None:
    tree.we_are_in("0::/a b")
    tree.mount("/sys/fs/c\\040group")
    tree.group("/sys/fs/c group/a b", memory__max=GIB, memory__current=0)
    assert tree.memory == (GIB, "/sys/fs/c group/a b")


@pytest.mark.parametrize("text", ["", "x", "0::", "::::", "5:memory", "35 31", " - ", "a b c d e - cgroup2"])
def test_what_cannot_be_read_bounds_nothing(tree: Tree, text: str) -> None:
    for name in ("cgroup", "mountinfo"):
        (tree.root / "proc/self" / name).write_text(text)
        assert (tree.memory, tree.cores) == ((32 * GIB, ""), (8, ""))


@pytest.mark.parametrize(
    ("quota", "cores"), [("1000 100000", 1), ("260000 100000", 3), ("9900000 100000", 8), ("x", 8)]
)
def test_a_quota_is_at_least_one_core_and_at_most_all(tree: Tree, quota: str, cores: int) -> None:
    tree.we_are_in("0::/")
    tree.mount("/sys/fs/cgroup")
    tree.group("/sys/fs/cgroup", cpu__max=quota)
    assert tree.cores[0] == cores


LIMIT = 300 << 20


@pytest.fixture
def real_groups() -> Iterator[dict[str, Path]]:
    """Groups of this machine, for memory and cpu, with a limit of 300 MiB and a quota of one core."""
    made: dict[str, Path] = {}
    try:
        for controller in ("memory", "cpu"):
            levels = list(resources._levels(controller, Path("/")))
            for level in levels:
                folder = level.path / f"tokenyard-test-{os.getpid()}"
                with suppress(OSError):
                    folder.mkdir(exist_ok=True)
                    if _bound(folder, level.version, controller) and _takes_processes(folder):
                        made[controller] = folder
                        break
                    _remove(folder)
        if "memory" not in made:
            pytest.skip("no control group with a memory limit can be made here (that takes root and a writable tree)")
        yield made
    finally:
        for folder in set(made.values()):
            _remove(folder)


def _remove(folder: Path) -> None:
    """The kernel may take a moment to forget the last process of a group."""
    deadline = time.monotonic() + 20
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


_JOIN = "import sys\nfor folder in sys.argv[1:]: open(folder + '/cgroup.procs', 'w').write('0')\n"


def _takes_processes(folder: Path) -> bool:
    """Some trees have groups that no process may join."""
    return subprocess.run([sys.executable, "-c", _JOIN, str(folder)], capture_output=True, timeout=60).returncode == 0


def _bound(folder: Path, version: int, controller: str) -> bool:
    wanted = {
        ("memory", 1): {"memory.limit_in_bytes": str(LIMIT)},
        ("memory", 2): {"memory.max": str(LIMIT)},
        ("cpu", 1): {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"},
        ("cpu", 2): {"cpu.max": "100000 100000"},
    }[controller, version]
    try:
        for name, value in wanted.items():
            (folder / name).write_text(value)
            if (folder / name).read_text().split() != value.split():
                return False
    except OSError:
        return False
    return True


def test_a_real_group_bounds_a_process_in_it(real_groups: dict[str, Path]) -> None:
    around = memory_room()
    if around.amount < 2 * LIMIT:
        pytest.skip(f"the group {around.group} of these tests has less room than the one that is made here")
    code = (
        _JOIN + "import json, os\n"
        "from shared.resources import core_room, memory_room\n"
        "rooms = [[room.amount, str(room.group)] for room in (memory_room(), core_room())]\n"
        "kept = all(str(os.getpid()) in open(folder + '/cgroup.procs').read().split() for folder in sys.argv[1:])\n"
        "print(json.dumps([kept, *rooms]))"
    )
    folders = sorted({str(folder) for folder in real_groups.values()})
    command = [sys.executable, "-c", code, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    kept, (memory, group), (cores, quota) = json.loads(done.stdout)
    if not kept:
        pytest.skip("this machine moves processes out of the groups that they were put in")
    assert 0 < memory < LIMIT
    assert group == str(real_groups["memory"])
    if "cpu" in real_groups:
        assert cores == 1
        # The tests themselves may have no more than one core.
        assert quota == str(real_groups["cpu"]) or min(visible_cores(), core_room().amount) == 1
