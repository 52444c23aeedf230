"""Checkpoints of the runs of a program: written by Orbax, and checked by a hash of our own.

A checkpoint is arrays by name and facts as JSON. What is read from one is data, never code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purejaxppo.types import PyTree
from purejaxppo.values import ConfigError

# Of what the arrays and facts mean; a reader refuses a higher one.
FORMAT = 1

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after an iteration.

    Attributes:
        arrays: by name, of all runs of the program.
        facts: what is known beside them, plain JSON.
        sha256: of both.
    """

    path: Path
    arrays: Arrays
    facts: dict[str, Any]
    sha256: str

    @property
    def iteration(self) -> int:
        """After which it was made."""
        return self.facts["iteration"]

    def named(self, prefix: str) -> Arrays:
        """The arrays saved with `flatten(prefix, dictionary)`."""
        start = prefix + "."
        return {k.removeprefix(start): x for k, x in self.arrays.items() if k.startswith(start)}

    def tree(self, prefix: str, shapes: PyTree) -> PyTree:
        """The arrays saved with `flatten(prefix, tree)`, as a tree like `shapes`.

        Raises:
            ConfigError: they are not of these shapes, or not numbers of these types: another
                configuration's.
        """
        leaves = []
        for name, shape in _named(prefix, shapes):
            found = self.arrays.get(name)
            if found is None and shape.size == 0:
                found = np.zeros(shape.shape, shape.dtype)
            if found is not None and found.dtype != shape.dtype:  # of an older version, perhaps
                same = found.astype(shape.dtype)
                found = same if np.array_equal(same, found) else found
            if found is None or (found.shape, found.dtype) != (shape.shape, shape.dtype):
                has = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
                raise ConfigError(
                    f"{self.path}: does not fit config.yaml: {name} should be "
                    f"{shape.dtype}{list(shape.shape)} and is {has}"
                )
            leaves.append(found)
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


class Writer:
    """Saves the checkpoints of one program, one at a time in the background.

    Args:
        keep: the latest so many stay.
        about: facts that all of them share.
    """

    def __init__(self, directory: Path, keep: int, about: dict[str, Any]) -> None:
        self._directory, self._keep, self._about = directory.resolve(), keep, about
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def save(self, arrays: Arrays, facts: dict[str, Any]) -> None:
        """Begins to save, once the one before is done; the arrays must not change any more.

        Args:
            facts: with the `iteration`, which must be above all that were saved.

        Raises:
            OSError: the one before could not be written.
        """
        self.wait()
        self._last = self._thread.submit(self._write, arrays, facts)

    def wait(self) -> None:
        """Returns when what was saved is on disk.

        Raises:
            OSError: it could not be written. The checkpoints before it are as they were.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, arrays: Arrays, facts: dict[str, Any]) -> None:
        iteration = facts["iteration"]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            facts = {**self._about, **facts, "format": FORMAT}
            facts["sha256"] = _hash(arrays, facts)
            with _orbax_alone() as (args, orbax):
                saved = args.Composite(arrays=args.PyTreeSave(arrays), facts=args.JsonSave(facts))
                orbax.save(self._directory / str(iteration), saved)
            old = iterations(self._directory)[self._keep :]
            unfinished = self._directory.glob("*tmp*")  # of a process that was killed
            for path in (*(self._directory / str(i) for i in old), *unfinished):
                shutil.rmtree(path, ignore_errors=True)
        except Exception as error:  # of any library below Orbax
            for part in self._directory.glob(f"{iteration}.*tmp*"):
                shutil.rmtree(part, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            line = " ".join(str(reason).split())
            raise OSError(
                f"{self._directory}: the checkpoint of iteration {iteration} could not be "
                f"written: {line[:200]}"
            ) from error


def iterations(directory: Path) -> list[int]:
    """Of the checkpoints in a directory that were finished, the latest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((int(path.name) for path in found if path.name.isdecimal()), reverse=True)


class DamagedError(ConfigError):
    """A checkpoint whose contents are not what was saved."""


def load(directory: Path) -> Checkpoint | None:
    """The latest checkpoint in a directory; None where there is none.

    Raises:
        ConfigError: it is damaged, or of a newer format.
    """
    while found := iterations(directory):
        try:
            return read(directory / str(found[0]))
        except DamagedError as error:
            if found[0] in iterations(directory):  # else a training has just removed it
                raise ConfigError(f"{error}; {_way_out(directory, found)}") from None
    return None


def _way_out(directory: Path, found: list[int]) -> str:
    """What can be done about the first of these, which is damaged."""
    for number, iteration in enumerate(found[1:], 1):
        with contextlib.suppress(ConfigError):
            read(directory / str(iteration))
            damaged = " ".join(str(directory / str(other)) for other in found[:number])
            return (
                f"the one of iteration {iteration} is whole: remove {damaged} to go on from there"
            )
    return "there is no other that is whole"


def read(path: Path) -> Checkpoint:
    """A checkpoint, with its hash checked.

    Raises:
        ConfigError: it is of a newer format.
        DamagedError: its bytes are not what they were.
        PermissionError: it may not be read.
    """
    path = path.resolve()
    try:
        with _orbax_alone() as (args, orbax):
            facts = dict(orbax.restore(path, args.Composite(facts=args.JsonRestore())).facts)
            if facts["format"] > FORMAT:
                raise ConfigError(
                    f"{path}: of format {facts['format']}, and this version of purejaxppo knows {FORMAT}"
                )
            saved = orbax.restore(path, args.Composite(arrays=args.PyTreeRestore()))
        arrays = {name: np.array(array) for name, array in saved.arrays.items()}
        sha256 = facts.pop("sha256")
        if sha256 != _hash(arrays, facts):
            raise DamagedError(f"{path}: damaged: its contents do not have the hash they had")
    except (ConfigError, PermissionError, MemoryError):
        raise
    except Exception as error:  # whatever the libraries make of bytes that are not theirs
        line = " ".join(str(error).split())
        raise DamagedError(f"{path}: damaged: {line[:200]}") from None
    return Checkpoint(path, arrays, facts, sha256)


class Best:
    """Of each of R runs, the policy with the highest evaluation.

    Until one is evaluated its latest policy is kept, so a run that diverges has one that works.

    Attributes:
        tree: as it is saved, host arrays [R, ...]: `params` and `obs_stats`; their `score`, minus infinity
            where there was no evaluation; and the `iteration` after which they were so, -1 where there is none yet.
    """

    def __init__(self, shapes: dict[str, PyTree], num_runs: int) -> None:
        policy = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        score, iteration = np.full(num_runs, -np.inf), np.full(num_runs, -1)
        self.tree: dict[str, Any] = {**policy, "score": score, "iteration": iteration}

    def update(
        self, policy: dict[str, PyTree], iteration: int, score: np.ndarray | None = None
    ) -> None:
        """Takes what is better: by its score [R], or, without, where there was no evaluation."""
        best = self.tree["score"]
        better = (best == -np.inf if score is None else score > best) & finite(policy["params"])
        new = {**policy, "score": best if score is None else score}
        new["iteration"] = np.full_like(self.tree["iteration"], iteration)

        def better_one(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            return np.where(better.reshape(-1, *[1] * (mine.ndim - 1)), theirs, mine)

        self.tree = jax.tree.map(better_one, self.tree, new)


def finite(params: PyTree) -> np.ndarray:
    """[R] whether all parameters [R, ...] of a run are numbers."""
    leaves = [np.isfinite(x).reshape(len(x), -1).all(1) for x in jax.tree.leaves(params)]
    return np.logical_and.reduce(leaves)


def flatten(prefix: str, tree: PyTree) -> Arrays:
    """Host arrays by their path in a tree; empty ones are left out.

    Raises:
        ConfigError: two have one name, as those of {"a.b": x} and {"a": {"b": y}}.
    """
    leaves = [(name, leaf) for name, leaf in _named(prefix, tree) if leaf.size]
    arrays = dict(leaves)
    if len(arrays) < len(leaves):
        raise ConfigError(f"{prefix}: names of different arrays are the same, with dots in them")
    return arrays


def _named(prefix: str, tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree.leaves_with_path(tree):
        yield prefix + "." + jax.tree_util.keystr(path, simple=True, separator="."), leaf


def _hash(arrays: Arrays, facts: dict[str, Any]) -> str:
    """Of names, types, shapes and contents."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


@functools.cache
def _orbax() -> Any:
    """Orbax, which takes most of a second to import, without its remarks: we tell what fails."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    hook = sys.unraisablehook

    def quiet(told: Any) -> None:  # of writes that go on in the background after one has failed
        if str(told.exc_value) != "Event loop is closed":
            hook(told)

    sys.unraisablehook = quiet
    import orbax.checkpoint

    return orbax.checkpoint


@contextlib.contextmanager
def _orbax_alone() -> Iterator[tuple[Any, Any]]:
    """Orbax's arguments and what takes them: of this process alone, however many train.

    No manager, who would read of all checkpoints beside one, and fail where one is damaged.
    """
    ocp, here = _orbax(), jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process{here}"
    )
    composite = ocp.CompositeOptions(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(composite_options=composite)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        yield ocp.args, checkpointer
