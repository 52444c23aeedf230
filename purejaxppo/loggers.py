"""The tables of a run directory, appended to while a training runs."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from purejaxppo.files import naming, replacing
from purejaxppo.sweep import Run, show
from purejaxppo.trackers import Trackers
from purejaxppo.types import Episode, Metrics
from purejaxppo.values import ConfigError

METRICS_COLUMNS = ["run", "seed", "iteration", "env_steps", *Metrics.__dataclass_fields__]
EVALUATION_COLUMNS = [
    "run", "seed", "iteration", "env_steps", "return_mean", "return_std", "length_mean", "episodes",
]  # fmt: skip


Columns = dict[str, list[Any]]  # of as many rows each, of one type
Follow = Callable[[list[dict[str, Any]]], None]


class Table:
    """A CSV file with a header; what is not a finite number stays empty.

    Args:
        goes_on: append to what is there; else nothing may be.
        follow: takes the rows, too.

    Raises:
        FileExistsError: there is something.
    """

    def __init__(
        self, path: Path, columns: list[str], goes_on: bool = False, follow: Follow | None = None
    ) -> None:
        self._path, self._columns, self._follow = path, columns, follow
        self._file = path.open("a" if goes_on else "x", newline="")
        with naming(self._path):
            if not self._file.tell():
                self._append([[name] for name in columns])
            self._file.flush()

    def write(self, columns: Columns) -> None:
        """Appends rows and hands them to the operating system.

        Raises:
            OSError: that takes no more.
        """
        with naming(self._path):
            self._append([columns[name] for name in self._columns])
            self._file.flush()
        if self._follow is not None:
            rows = zip(*columns.values(), strict=True)
            self._follow([dict(zip(columns, row, strict=True)) for row in rows])

    def _append(self, columns: list[list[Any]]) -> None:
        forms, cells = zip(*map(_cells, columns), strict=True)
        values = itertools.chain.from_iterable(zip(*cells, strict=True))
        # All at once: thousands of runs give a million cells a second.
        self._file.write((",".join(forms) + "\r\n") * len(columns[0]) % tuple(values))

    def sync(self) -> None:
        """Brings all rows to the disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Tries once more what the operating system has not taken."""
        with naming(self._path):
            self._file.close()


class Tables:
    """The tables that grow while a training runs; closed at the end of a `with`.

    Args:
        run_dir: None where they are not to be kept.
        swept: the options that runs differ in, with any values.
        goes_on: append to those that are there, which `keep_rows` has cut.
        trackers: take what the tables take, and videos.
    """

    def __init__(
        self,
        run_dir: Path | None,
        swept: dict[str, Any],
        goes_on: bool = False,
        trackers: Trackers | None = None,
    ) -> None:
        self._trackers = trackers

        def table(name: str, columns: list[str], kind: str) -> Table:
            follow = functools.partial(trackers.write, kind) if trackers else None
            columns = columns + list(swept_columns(swept))
            if run_dir is None:
                return Table(Path(os.devnull), columns, goes_on=True)
            return Table(run_dir / name, columns, goes_on, follow)

        self.metrics = table("metrics.csv", METRICS_COLUMNS, "")
        self.evaluation = table("evaluation.csv", EVALUATION_COLUMNS, "evaluation/")

    def video(self, run: int, env_steps: int, path: Path) -> None:
        """Tells of a film of a run."""
        if self._trackers is not None:
            self._trackers.video(run, env_steps, path)

    def sync(self) -> None:
        """Brings all rows to the disk."""
        self.metrics.sync()
        self.evaluation.sync()

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # each, whatever becomes of the others
            if self._trackers is not None:
                stack.callback(self._trackers.close)
            stack.callback(self.evaluation.close)
            stack.callback(self.metrics.close)


def keep_rows(path: Path, kept: dict[int, dict[str, int]], target: Path | None = None) -> None:
    """Leaves of a table only the rows of runs up to a checkpoint; as a whole or not at all.

    Args:
        kept: what the checkpoint says of each run: `rows` up to the iteration `until`.
        target: where the rows go instead, as those of run 0 and without what is swept.

    Raises:
        ConfigError: it is no such table, or rows are gone.
    """
    until = {run: each["until"] for run, each in kept.items()}
    there = path.exists() and path.stat().st_size > 0
    with replacing(target or path) if there else contextlib.nullcontext() as part:
        counts = _copy_rows(path, part, until, target is not None) if part else Counter()
        for run, each in kept.items():
            if counts[run] != each["rows"]:
                raise ConfigError(
                    f"{path}: has {counts[run]} rows of run {run} up to its checkpoint, and had "
                    f"{each['rows']}"
                )


def _copy_rows(path: Path, part: Path, until: dict[int, int], alone: bool) -> Counter[int]:
    """Writes the rows of runs up to an iteration, those of a run `alone` as run 0's; counts them by run."""
    counts: Counter[int] = Counter()
    try:
        with path.open(newline="") as old, part.open("w", newline="") as new:
            rows = csv.reader(old)
            header = next(rows, [])
            run, iteration = header.index("run"), header.index("iteration")
            shown = [i for i, name in enumerate(header) if not (alone and "sweep." in name)]
            writer = csv.writer(new)
            writer.writerow([header[i] for i in shown])
            for row in rows:
                # The last one may have been cut off.
                if len(row) == len(header) and int(row[iteration]) <= until.get(int(row[run]), 0):
                    counts[int(row[run])] += 1
                    row[run] = "0" if alone else row[run]
                    writer.writerow([row[i] for i in shown])
    except ValueError:
        raise ConfigError(f"{path}: not a table of a training") from None
    return counts


def _cells(values: list[Any]) -> tuple[str, list[Any]]:
    """A column as it is written, and how: seven digits of a number, and nothing where it is not finite."""
    if isinstance(values[0], str):
        return "%s", list(map(_quoted, values))
    if not isinstance(values[0], float):
        return "%s", values
    if all(map(math.isfinite, values)):
        return "%.7g", values
    return "%s", [f"{x:.7g}" if math.isfinite(x) else "" for x in values]


@functools.cache
def _quoted(text: str) -> str:
    """In quotation marks where it has a comma."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([text])
    return line.getvalue()


class MetricsTable:
    """Writes `metrics.csv`: a row a run and reporting interval.

    Attributes:
        iteration: the last one taken.
        pending: metrics [I, R] of the interval so far; empty at its start.
        rows: of each run.

    Args:
        table: may be shared with other programs of a sweep.
        runs: [R].
        interval: iterations that a row is the mean of.
        steps_per_iteration: environment steps of one run.
        iteration: that a training goes on from.
        pending: metrics [I, R] of the interval it stopped in.
        rows: that every run has already.
    """

    def __init__(
        self,
        table: Table,
        runs: list[Run],
        interval: int,
        steps_per_iteration: int,
        iteration: int = 0,
        pending: dict[str, np.ndarray] | None = None,
        rows: int = 0,
    ) -> None:
        self._table, self._num_runs, self._places = table, len(runs), _places(runs)
        self._interval, self._steps_per_iteration = interval, steps_per_iteration
        self.iteration, self.rows = iteration, rows
        self.pending = pending or {}

    @property
    def until(self) -> int:
        """The iteration of the last row."""
        return self.iteration - self._waiting

    @property
    def _waiting(self) -> int:
        """Iterations that no row has yet."""
        return len(self.pending["episodes"]) if self.pending else 0

    def add(self, metrics: dict[str, np.ndarray]) -> None:
        """Takes the metrics [C, R] of C further iterations."""
        if self.pending:
            metrics = {k: np.concatenate([x, metrics[k]]) for k, x in self.pending.items()}
        self.iteration += len(metrics["episodes"]) - self._waiting
        self.pending = metrics
        self._write(self._waiting // self._interval, self._interval)

    def flush(self) -> None:
        """Writes what there is of an interval."""
        self._write(int(self._waiting > 0), self._waiting)

    def _write(self, count: int, interval: int) -> None:
        """So many rows of every run, each of an interval of what is pending."""
        if not count:
            return
        first, taken = self.until, count * interval
        shape = (count, interval, self._num_runs)
        means = pool({k: x[:taken].reshape(shape).swapaxes(0, 1) for k, x in self.pending.items()})
        left = self._waiting > taken
        self.pending = {k: x[taken:] for k, x in self.pending.items()} if left else {}
        self.rows += count
        ends = [first + (i + 1) * interval for i in range(count) for _ in range(self._num_runs)]
        columns = {name: values * count for name, values in self._places.items()}
        columns["iteration"] = ends
        columns["env_steps"] = [end * self._steps_per_iteration for end in ends]
        self._table.write(columns | {name: x.ravel().tolist() for name, x in means.items()})


def _places(runs: list[Run]) -> Columns:
    """What all rows of a run have in common: its number and seed, and the swept values."""
    rows = [
        {"run": run.number, "seed": run.seed} | swept_columns(run.setting.swept) for run in runs
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def swept_columns(swept: dict[str, Any]) -> dict[str, Any]:
    """A column for each swept option."""
    return {f"sweep.{name}": show(name, value) for name, value in swept.items()}


def pool(metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Metrics [I, ...] of I iterations, or of as many devices, in one: [...].

    Counts are added, episodes weighed by their count, and of all else there is the mean: NaN where
    there is nothing to average.
    """
    pooled = {}
    for name, values in metrics.items():
        if name in ("episodes", "invalid_steps"):
            pooled[name] = values.sum(0)
            continue
        episodic = name in ("episode_return", "episode_length")
        values = np.asarray(values, np.float64)  # in which the order of a sum shows nowhere
        weights = metrics["episodes"] if episodic else np.ones_like(values)
        # An explained variance or an episode mean may be missing; a diverged loss must show.
        missing = np.isnan(values) & (episodic or name == "explained_variance")
        weights = np.where(missing, 0, weights)
        total = weights.sum(0)
        mean = np.where(missing, 0.0, values * weights).sum(0) / np.maximum(total, 1)
        pooled[name] = np.where(total > 0, mean, np.nan)
    return pooled


def blank_diverged(metrics: dict[str, np.ndarray], batch_size: int) -> dict[str, np.ndarray]:
    """Metrics [C, R] without the numbers of runs that had diverged before, which mean nothing.

    None of their values is a number; nor of continuous actions, so that no step of the `batch_size` of an
    iteration is valid, and none counts for the mean value.
    """
    acted = (metrics["invalid_steps"] < batch_size) & np.isfinite(metrics["value_mean"])
    bad = ~acted & ~np.isfinite(metrics["grad_norm"])
    blank = {"episodes": 0, "invalid_steps": metrics["invalid_steps"]}
    return {name: np.where(bad, blank.get(name, np.nan), x) for name, x in metrics.items()}


class EvaluationTable:
    """Writes `evaluation.csv`: a row a run [R] and evaluation; `rows` counts those of each run."""

    def __init__(self, table: Table, runs: list[Run], rows: int = 0) -> None:
        self._table, self._places, self.rows = table, _places(runs), rows

    def add(self, episodes: Episode, iteration: int, env_steps: int) -> np.ndarray:
        """Takes host episodes [R, E]; returns the mean returns [R], NaN where none ended."""
        all_ended = episodes.ended.all()

        def of_ended(statistic: Any, values: Any) -> list[float]:
            if all_ended:  # of all runs at once
                return statistic(values, axis=1).tolist()
            each = zip(values, episodes.ended, strict=True)
            return [float(statistic(x[ended])) if ended.any() else math.nan for x, ended in each]

        means = of_ended(np.mean, episodes.score)
        self._table.write(
            self._places
            | {
                "iteration": [iteration] * len(means),
                "env_steps": [env_steps] * len(means),
                "return_mean": means,
                "return_std": of_ended(np.std, episodes.score),
                "length_mean": of_ended(np.mean, episodes.length),
                "episodes": episodes.ended.sum(1).tolist(),
            }
        )
        self.rows += 1
        return np.array(means)
