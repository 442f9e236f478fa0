"""The memory and cores that this process may still take of its machine, as far as its control groups let it.

A limit may stand at any level above the process: on a container, on a systemd unit, on the slice that it is in. So
every level is read from the process's own group (/proc/self/cgroup) up to the root that is mounted here, in both
versions of control groups, and the least limit wins. Knows nothing of GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
# Escapes of /proc/self/mountinfo, for spaces and the like.
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Room:
    """An amount (bytes, or cores), and the folder of the control group that sets it; None: the machine does."""

    amount: float
    group: Path | None = None


@dataclass(frozen=True)
class _Level:
    """The folder of one control group on the way up from ours."""

    path: Path
    version: int

    def number(self, name: str) -> int | None:
        """Read a number from a file of the group; None for a file that is not there, and for `max`."""
        return _number(self._read(name))

    def field(self, name: str, key: str) -> int:
        """Read a line of a flat keyed file such as memory.stat; 0 when it is not there."""
        lines = (line.split() for line in self._read(name).splitlines())
        return next((_number(parts[1]) or 0 for parts in lines if len(parts) == 2 and parts[0] == key), 0)

    def pair(self, name: str) -> tuple[int | None, int | None]:
        first, _, second = self._read(name).partition(" ")
        return _number(first), _number(second)

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return ""


def free_memory() -> int:
    """Return the bytes that can be taken without swapping or being killed."""
    return int(memory_room().amount)


def usable_cores() -> int:
    """Return whole cores' worth of CPU time, at least 1."""
    return int(core_room().amount)


def memory_room(root: Path = _ROOT) -> Room:
    """Return the free memory, and the control group that bounds it."""
    rooms = (_memory_left(level) for level in _levels("memory", root))
    return min([Room(_available(root)), *(room for room in rooms if room)], key=lambda room: room.amount)


def core_room(root: Path = _ROOT) -> Room:
    """Return the usable cores, and the control group that bounds them: the visible cores, or the least quota."""
    quotas = (_quota(level) for level in _levels("cpu", root))
    least = min([Room(visible_cores()), *(quota for quota in quotas if quota)], key=lambda room: room.amount)
    return Room(max(1, round(least.amount)), least.group)


def visible_cores() -> int:
    """Return the cores that libraries see when they size their thread pools."""
    return len(os.sched_getaffinity(0))


def _memory_left(level: _Level) -> Room | None:
    """Return the memory that the group may still take.

    Pages of files count as free, as in the kernel's MemAvailable: they go when memory is wanted. Otherwise the amount
    would depend on which files were read before, and how often.
    """
    if level.version == 2:
        # Beyond memory.high no process is killed, but all are slowed down: it is a limit, too.
        limits = [level.number("memory.max"), level.number("memory.high")]
        used = level.number("memory.current")
        files = ("inactive_file", "active_file")
    else:
        limits = [level.number("memory.limit_in_bytes")]
        used = level.number("memory.usage_in_bytes")
        files = ("total_inactive_file", "total_active_file")
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None or used is None:
        return None
    reclaimable = sum(level.field("memory.stat", name) for name in files)
    return Room(max(0, limit - max(0, used - reclaimable)), level.path)


def _quota(level: _Level) -> Room | None:
    if level.version == 2:
        quota, period = level.pair("cpu.max")
    else:
        quota = level.number("cpu.cfs_quota_us")
        period = level.number("cpu.cfs_period_us")
    # Version 1 says -1 where version 2 says max.
    return Room(quota / period, level.path) if quota is not None and quota > 0 and period else None


def _available(root: Path) -> int:
    """Return the available memory of the whole machine, as the kernel estimates it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _levels(controller: str, root: Path) -> Iterator[_Level]:
    """Yield the groups that hold this process under a controller, in each hierarchy that is mounted here, ours
    first."""
    own = _own_groups(root)
    for (hierarchy, group), mount in _mounts(controller, root).items():
        version = 2 if hierarchy == "" else 1
        path = own.get(controller if version == 1 else "")
        if path is None:
            continue
        for folder in _way_up(path, group):
            yield _Level(root / mount.relative_to("/") / folder, version)


def _own_groups(root: Path) -> dict[str, PurePosixPath]:
    """Return this process's groups by controller; version 2's one hierarchy has the name "" (cgroups(7))."""
    lines = (line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines())
    return {
        controller: PurePosixPath(parts[2]) for parts in lines if len(parts) == 3 for controller in parts[1].split(",")
    }


def _mounts(controller: str, root: Path) -> dict[tuple[str, PurePosixPath], PurePosixPath]:
    """Return mount points by hierarchy and by the group that is seen there; of mounts over each other, the one on
    top."""
    on_top: dict[str, tuple[str, PurePosixPath]] = {}
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        kind, *_, options = [*after.split(), "", ""][:3]
        if len(fields) < 5 or kind not in ("cgroup", "cgroup2"):
            continue
        if kind == "cgroup2" or controller in options.split(","):
            on_top[_plain(fields[4])] = ("" if kind == "cgroup2" else controller, PurePosixPath(_plain(fields[3])))
    return {seen: PurePosixPath(point) for point, seen in on_top.items()}


def _way_up(path: PurePosixPath, seen: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield folders below the mount point, from the process's group up to the one that the mount point shows.

    In a container whose groups are those of its host, the mount may show another part of the tree than ours: then the
    mount point itself is what is known.
    """
    if path.is_relative_to(seen) and ".." not in path.parts:
        below = path.relative_to(seen)
        yield from (below, *below.parents) if below.parts else (below,)
    else:
        yield PurePosixPath()


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
