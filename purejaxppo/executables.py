"""Compiled programs that outlive their process: found again before they are traced.

JAX's own cache finds a program by what it was lowered to, and to trace and lower it is the largest part of a second
start. Here it is found by what it would be traced from: the code, the options and the devices. Where those may
not say it all, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import logging
import math
import os
import pickle
import platform
import sys
import sysconfig
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.extend.mlir import ir

import purejaxppo
from purejaxppo import cpu, machine
from purejaxppo.effort import quick_below

_MOST_BYTES = 2**30  # of all files; those used last stay
_YOUNG = 2.0  # seconds by which the clock of a file may differ

_INSTALLED = {"site-packages", "dist-packages"}  # folders of packages

# Packages whose files decide what is traced, data such as robots among them; those that are loaded.
_PACKAGES = (
    "purejaxppo", "jax", "flax", "optax", "chex",
    "brax", "craftax", "gymnax", "mujoco", "mujoco_playground", "octax", "xminigrid",
)  # fmt: skip


class _Kept(NamedTuple):
    """A program as it lies in its file."""

    quick_below: float
    num_bytes: int
    in_tree: Any
    out_shapes: Any
    program: bytes


@dataclass
class Executable:
    """A function for arguments of given shapes: compiled, or loaded as it was compiled before.

    Attributes:
        function: jitted.
        arguments: or their shapes.
        asked: the effort to compile with, or auto.
        calls: in a whole training, of it or of the loop within it, which decide then.
        quick: options for the compiler, in place of the function's own.
        devices: that it runs on.
        key: that it is kept under, see `fingerprint`; None to trace and compile it.
        loaded: whether it was compiled before, once it is there.
        num_bytes: of its arguments, of what it computes and of its results, likewise.
    """

    function: Any
    arguments: tuple[Any, ...]
    asked: str
    calls: int
    quick: dict[str, Any]
    devices: Sequence[Any]
    key: str | None
    loaded: bool = field(default=False, init=False)
    num_bytes: int = field(init=False)

    @functools.cached_property
    def effort(self) -> str:
        """That it is compiled with: quick, to a slower program that rounds differently, or full."""
        if self.asked != "auto":
            return self.asked
        kept = self._files["quick"] or self._files["full"]
        below = kept.quick_below if kept else self._quick_below
        return "quick" if self.calls < below else "full"

    @functools.cached_property
    def out_shapes(self) -> Any:
        """Of its results."""
        if kept := self._files[self.effort]:
            return kept.out_shapes
        given = self._traced.out_info
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    def start(self, threads: Executor) -> Future[jax.stages.Compiled]:
        """Begins to compile it: XLA does so without Python's lock, while the next one is traced."""
        if not self._files[self.effort]:
            _ = self._lowered
        return threads.submit(self._make)

    @functools.cached_property
    def _traced(self) -> Any:
        return self.function.trace(*self.arguments)

    @functools.cached_property
    def _lowered(self) -> Any:
        lowered = self._traced.lower()
        # JAX's cache must not have it from another process, where it is not kept: see `_compile`.
        if self.key is not None:
            module = lowered.compiler_ir()
            with module.context:
                name = ir.StringAttr.get(_module_name(self.key))
                module.operation.attributes["sym_name"] = name
        return lowered

    @functools.cached_property
    def _quick_below(self) -> float:
        return quick_below(self._traced.jaxpr.jaxpr)

    @functools.cached_property
    def _files(self) -> _Files:
        return _Files(self.key, jax.tree.structure((self.arguments, {})))

    def _make(self) -> jax.stages.Compiled:
        try:
            return self._load() or self._compile()
        finally:  # a training needs none of them any more
            for name in ("_files", "_traced", "_lowered"):
                vars(self).pop(name, None)

    def _load(self) -> jax.stages.Compiled | None:
        kept = self._files[self.effort]
        if kept is None:
            return None
        out_tree = jax.tree.structure(kept.out_shapes)
        try:
            program = deserialize_and_load(
                kept.program, kept.in_tree, out_tree, execution_devices=self.devices
            )
        except Exception:  # whatever is wrong with it, it can be compiled anew
            _log.debug("cannot be loaded: %s", self.key, exc_info=True)
            return None
        self.loaded, self.num_bytes = True, kept.num_bytes
        return program

    def _compile(self) -> jax.stages.Compiled:
        _fresh.compiled = False
        compiled = self._lowered.compile(self.quick if self.effort == "quick" else None)
        self.num_bytes = num_bytes(compiled)
        # What JAX's cache had is not whole any more, once it is written down again. And what a program calls
        # must be registered by then, as tracing does.
        if self.key is None or not _fresh.compiled or self._calls_a_library():
            return compiled
        try:
            program, in_tree, _ = serialize(compiled)
            kept = _Kept(self._quick_below, self.num_bytes, in_tree, self.out_shapes, program)
            self._files.write(self.effort, kept)
        except Exception:  # it is needed no less where it cannot be kept
            _log.debug("cannot be kept: %s", self.key, exc_info=True)
        return compiled

    def _calls_a_library(self) -> bool:
        code = io.BytesIO()  # to write its text takes five times as long
        self._lowered.compiler_ir().operation.write_bytecode(code)
        return b"custom_call" in code.getvalue()


def num_bytes(compiled: jax.stages.Compiled) -> int:
    """Of a program's arguments, of what it computes and of its results."""
    memory: Any = compiled.memory_analysis()
    whole = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return whole + memory.output_size_in_bytes - memory.alias_size_in_bytes


class _Files(dict[str, "_Kept | None"]):
    """What is kept under a key, by effort; read when it is asked for."""

    def __init__(self, key: str | None, in_tree: Any) -> None:
        super().__init__()
        self._key, self._in_tree = key, in_tree

    def __missing__(self, effort: str) -> _Kept | None:
        self[effort] = None
        if self._key is not None:
            with contextlib.suppress(Exception):  # there is none, or it is damaged
                kept = _Kept(*pickle.loads(zlib.decompress(self._path(effort).read_bytes())))
                self[effort] = kept if kept.in_tree == self._in_tree else None
            with contextlib.suppress(OSError):  # nor need the folder be ours to write
                os.utime(self._path(effort))
        return self[effort]

    def write(self, effort: str, kept: _Kept) -> None:
        """Writes a file, and removes those used longest ago that there is no room for.

        What JAX's cache has of it goes: whoever loses this file compiles anew, and can keep that.
        """
        assert self._key is not None
        path = self._path(effort)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.write_bytes(zlib.compress(pickle.dumps(tuple(kept)), 1))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        for cached in path.parent.parent.glob(f"{_module_name(self._key)}-*"):
            cached.unlink(missing_ok=True)
        room = _MOST_BYTES
        with contextlib.suppress(FileNotFoundError):  # another process removes them, too
            files = [(file.stat().st_mtime, file) for file in path.parent.iterdir()]
            for _, file in sorted(files, reverse=True):
                room -= file.stat().st_size
                if room < 0:
                    file.unlink()

    def _path(self, effort: str) -> Path:
        folder = Path(jax.config.values["jax_compilation_cache_dir"]) / "executables"
        return folder / f"{self._key}-{effort}"


def _module_name(key: str) -> str:
    """Of a program's module, by which JAX's cache names its files."""
    return f"jit_program_{key[:16]}"


_log = logging.getLogger(__name__)
_fresh = threading.local()  # compiled: whether this thread has, since it was set to False


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _fresh.compiled = True


jax.monitoring.register_event_listener(_note)


def fingerprint(*parts: Any) -> str | None:
    """What a program is kept under that is traced from these, which their `repr` tells; None if it is not kept.

    It is not in a process that another script began, which may have changed what functions do, nor where
    a file has changed since this process began, nor on accelerators, where this has not been tried. Of what our
    code, changed by its user, imports at the top, files of no installed package are noticed; nothing else that it reads.
    """
    settings, flags = jax.config.values, os.environ.get("XLA_FLAGS", "").strip()
    cache = settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]
    if not cache or "://" in cache or not _is_ours():
        return None
    if flags and not flags.startswith("-"):  # they are in a file
        return None
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return None
    code, youngest = _code()
    if youngest > purejaxppo.started - _YOUNG:
        return None
    threads = os.environ.get("PJRT_NPROC"), machine.num_cores()
    devices = machine.device_name(), cpu.features() or platform.node(), len(jax.devices())
    whole = code, machine.versions(), sorted(settings.items()), flags, threads, devices, parts
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _is_ours() -> bool:
    """Whether the process is the command line: `python -m purejaxppo.run`, or the console script."""
    main = sys.modules["__main__"]
    name = main.__spec__.name if main.__spec__ else Path(getattr(main, "__file__", "") or "").stem
    return name in ("purejaxppo.run", "purejaxppo")


@functools.cache
def _code() -> tuple[str, float]:
    """A hash of the code that is loaded, and when its youngest file was written."""
    found, youngest = hashlib.sha256(), 0.0
    for package in filter(None, map(sys.modules.get, _PACKAGES)):
        for path in _files_of(package):
            with contextlib.suppress(OSError):  # a link to nowhere
                about = os.stat(path)
                youngest = max(youngest, about.st_mtime)
                found.update(f"{path} {about.st_size} ".encode())
                is_ours = package is purejaxppo
                found.update(Path(path).read_bytes() if is_ours else b"%d" % about.st_mtime_ns)
    for path in _files_of_users():
        try:
            youngest = max(youngest, os.stat(path).st_mtime)
            found.update(f"{path} ".encode() + Path(path).read_bytes())
        except OSError:  # within an archive, perhaps
            youngest = math.inf
    return found.hexdigest(), youngest


def _files_of_users() -> list[str]:
    """Files of modules that belong to no installed package, but that which the process began with."""
    folders = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *purejaxppo.__path__
    own = tuple(folder + os.sep for folder in folders)
    # Not `getattr`, which loads what is lazy.
    attributes = (
        object.__getattribute__(module, "__dict__")
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
    )
    files = {found.get("__file__") or "" for found in attributes}
    files -= {"", getattr(sys.modules["__main__"], "__file__", None) or ""}
    return sorted(
        path
        for path in files
        if not path.startswith(own) and _INSTALLED.isdisjoint(Path(path).parts)
    )


def _files_of(package: ModuleType) -> Iterator[str]:
    """All but those that Python makes of others."""
    for folder, folders, names in itertools.chain(*map(os.walk, package.__path__)):
        folders.sort()
        yield from (f"{folder}/{name}" for name in sorted(names) if not name.endswith(".pyc"))
