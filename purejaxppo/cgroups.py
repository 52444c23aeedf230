"""What Linux's control groups leave to this process: containers and batch systems limit it by them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

_ROOT, _MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

# Of either version: the limit, what counts against it, and which of that the system lets go of: files that were read.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def num_cores() -> int | None:
    """CPU cores whose time the process may use, rounded up; None where there is no limit."""
    limits = [limit for group in _groups("cpu") for limit in _quotas(group)]
    return max(1, math.ceil(min(limits))) if limits else None


def free_memory() -> int | None:
    """Bytes that the process may still take; None where there is no limit."""
    free = []
    for group in _groups("memory"):
        for limit, used, files in _MEMORY:
            with contextlib.suppress(OSError, ValueError):  # of the other version, or "max"
                lines = (group / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
                taken = int((group / used).read_text()) - int(stat.get(files, 0))
                free.append(int((group / limit).read_text()) - taken)
    return min(free, default=None)


def _quotas(group: Path) -> Iterator[float]:
    """Cores that a group may use."""
    with contextlib.suppress(OSError, ValueError):  # of version 1, or "max"
        quota, period = (group / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with contextlib.suppress(OSError):
        quota, period = (
            int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
        if quota > 0:
            yield quota / period


def _groups(controller: str) -> Iterator[Path]:
    """The group this process is in and all around it, as its limits are theirs too.

    In a container only the outermost may be there, which is the container's own.
    """
    with contextlib.suppress(OSError):  # another system
        for line in _MINE.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mounted = _ROOT / controller if controllers else _ROOT
            group = mounted / path.lstrip("/")
            yield from (place for place in (group, *group.parents) if place.is_relative_to(mounted))
