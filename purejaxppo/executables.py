"""Compiled programs that outlive their process: found again before they are traced.

JAX's own cache finds a program by what it was lowered to, and to trace and lower it takes longer than all else
of a second start. Here it is found by what it would be traced from: the code, the options and the devices. Where
those may not say it all, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import platform
import sys
import tempfile
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from purejaxppo import cpu, machine
from purejaxppo.effort import quick_below

_MOST = 200  # files, those that were used last

# Packages whose files are read beside their code, as of robots and textures.
_WITH_DATA = ("purejaxppo", "brax", "craftax", "gymnax", "mujoco_playground", "octax", "xminigrid")


class _Kept(NamedTuple):
    """A program as it lies in its file."""

    quick_below: float
    takes: Any  # the structure of its arguments
    results: Any
    program: bytes


@dataclass
class Executable:
    """A function for arguments of given shapes: compiled, or taken up as it was compiled before.

    Attributes:
        function: jitted.
        arguments: or their shapes.
        asked: the effort to compile with, or auto.
        times: that it, or the loop within it, is repeated in a whole training, which decides then.
        quick: options for the compiler, in place of the function's own.
        devices: that it runs on.
        key: that it is kept under, see `fingerprint`; None to trace and compile it.
    """

    function: Any
    arguments: tuple[Any, ...]
    asked: str
    times: int
    quick: dict[str, Any]
    devices: Sequence[Any]
    key: str | None

    @functools.cached_property
    def effort(self) -> str:
        """That it is compiled with: quick, to a slower program that rounds differently, or full."""
        if self.asked != "auto":
            return self.asked
        found = self._read("quick") or self._read("full")
        below = found.quick_below if found else self._quick_below
        return "quick" if self.times < below else "full"

    @functools.cached_property
    def results(self) -> Any:
        """Their shapes."""
        if self._kept:
            return self._kept.results
        given = self._traced.out_info
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    @property
    def kept(self) -> bool:
        """Whether it was compiled before."""
        return self._kept is not None

    def start(self, threads: Executor) -> Future[jax.stages.Compiled]:
        """Begins to compile it: XLA does so without Python's lock, while the next one is traced."""
        if not self.kept:
            _ = self._lowered
        return threads.submit(self._make)

    @functools.cached_property
    def _traced(self) -> Any:
        return self.function.trace(*self.arguments)

    @functools.cached_property
    def _lowered(self) -> Any:
        return self._traced.lower()

    @functools.cached_property
    def _quick_below(self) -> float:
        return quick_below(self._traced.jaxpr.jaxpr)

    @functools.cached_property
    def _kept(self) -> _Kept | None:
        found = self._read(self.effort)
        return found if found and found.takes == self._takes else None

    @property
    def _takes(self) -> Any:
        return jax.tree.structure((self.arguments, {}))

    def _path(self, effort: str) -> Path:
        return directory() / f"{self.key}-{effort}"

    def _read(self, effort: str) -> _Kept | None:
        if self.key is None:
            return None
        # There is no such file, or it is damaged.
        with contextlib.suppress(Exception):
            found = _Kept(*pickle.loads(zlib.decompress(self._path(effort).read_bytes())))
            os.utime(self._path(effort))
            return found
        return None

    def _make(self) -> jax.stages.Compiled:
        if found := self._kept:
            with contextlib.suppress(Exception):  # compiled anew, whatever is wrong with it
                gives = jax.tree.structure(found.results)
                return deserialize_and_load(
                    found.program, found.takes, gives, execution_devices=self.devices
                )
        _fresh.compiled = False
        compiled = self._lowered.compile(self.quick if self.effort == "quick" else None)
        # What JAX's cache had is not whole any more, once it is written down again.
        if self.key is not None and _fresh.compiled:
            with contextlib.suppress(Exception):  # it is needed no less where it cannot be kept
                self._keep(compiled)
        return compiled

    def _keep(self, compiled: jax.stages.Compiled) -> None:
        # What is called outside of the program must be registered by then, as tracing does.
        if "custom_call" in self._lowered.as_text():
            return
        program, takes, _ = serialize(compiled)
        kept = _Kept(self._quick_below, takes, self.results, program)
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory(), delete=False) as part:
            part.write(zlib.compress(pickle.dumps(tuple(kept)), 1))
        os.replace(part.name, self._path(self.effort))
        files = sorted(directory().iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST]:
            file.unlink(missing_ok=True)


_fresh = threading.local()  # compiled: whether this thread has, since it was set to False


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _fresh.compiled = True


jax.monitoring.register_event_listener(_note)


def directory() -> Path:
    """Where they are kept: in that of JAX's own cache."""
    return Path(jax.config.values["jax_compilation_cache_dir"]) / "executables"


def fingerprint(*parts: Any) -> str | None:
    """What a program is kept under that is traced from these, which their `repr` tells; None if it is not kept.

    It is not in a process that another script began, which may have changed what functions do, nor
    on accelerators, where this has not been tried.
    """
    settings = jax.config.values
    cache = settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]
    if not cache or "://" in cache or not _is_ours():
        return None
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return None
    code = _code(), machine.versions(), sorted(settings.items()), os.environ.get("XLA_FLAGS")
    devices = machine.device_name(), cpu.features() or platform.node(), len(jax.devices())
    return hashlib.sha256(repr((code, devices, parts)).encode()).hexdigest()


def _is_ours() -> bool:
    """Whether the process is the command line: `python -m purejaxppo.run`, or the console script."""
    main = sys.modules["__main__"]
    name = main.__spec__.name if main.__spec__ else Path(getattr(main, "__file__", "")).stem
    return name in ("purejaxppo.run", "purejaxppo")


@functools.cache
def _code() -> list[tuple[str, int, int]]:
    """Path, time and size of what programs depend on; as first asked for, for tracing loads more of it."""
    files = {
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in sys.stdlib_module_names
    }
    files -= {getattr(sys.modules["__main__"], "__file__", "")}  # one of two for the same command
    for package in filter(None, map(sys.modules.get, _WITH_DATA)):
        for folder, _, names in itertools.chain(*map(os.walk, package.__path__)):
            files.update(os.path.join(folder, name) for name in names)
    found = []
    for path in sorted(files):
        with contextlib.suppress(OSError):  # as of a module in an archive
            about = os.stat(path)
            found.append((path, about.st_mtime_ns, about.st_size))
    return [file for file in found if not file[0].endswith(".pyc")]
