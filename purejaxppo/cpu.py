"""The CPU, as Linux describes it."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path


def model() -> str | None:
    """Its name, where the system says one."""
    for line in _cpuinfo().splitlines():
        if line.startswith("model name"):
            return line.split(": ")[1]
    return None


def has_avx512() -> bool:
    """Whether it has vectors of 512 bits."""
    return " avx512f" in _cpuinfo()


def features() -> str | None:
    """What it has beside its first instructions, where the system says it."""
    lines = _cpuinfo().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), None)


@functools.cache
def _cpuinfo() -> str:
    """What is said of every core; nothing on other systems."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""
