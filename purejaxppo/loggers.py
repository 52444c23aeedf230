"""The tables of a run directory, appended to while a training runs."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from purejaxppo.types import Episode, Metrics

METRICS_COLUMNS = ["run", "seed", "iteration", "env_steps", *Metrics.__dataclass_fields__]
EVALUATION_COLUMNS = [
    "run", "seed", "iteration", "env_steps", "return_mean", "return_std", "length_mean", "episodes",
]  # fmt: skip


class Table:
    """A CSV file with a header; what is not a finite number stays empty."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self._file = path.open("x", newline="")
        self._writer = csv.writer(self._file)
        self._columns = columns
        self._writer.writerow(columns)
        self._file.flush()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows and hands them to the operating system."""
        for row in rows:
            self._writer.writerow([_cell(row[column]) for column in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cell(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return f"{value:.7g}" if math.isfinite(value) else ""
    return value


@dataclass
class MetricsTable:
    """`metrics.csv`: a row a run and reporting interval.

    Attributes:
        interval: iterations that a row is the mean of.
        steps_per_iteration: environment steps of one run.
        rows: all rows so far.
    """

    path: Path
    seeds: list[int]
    interval: int
    steps_per_iteration: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._table = Table(self.path, METRICS_COLUMNS)
        self._pending: list[dict[str, np.ndarray]] = []
        self._iteration = 0

    def add(self, metrics: dict[str, np.ndarray]) -> None:
        """Takes the metrics [C, R] of C further iterations."""
        for i in range(len(metrics["episodes"])):
            self._pending.append({name: array[i] for name, array in metrics.items()})
            self._iteration += 1
            if len(self._pending) == self.interval:
                self._write_interval()

    def close(self) -> None:
        """Writes what is left of an interval, and the file."""
        if self._pending:
            self._write_interval()
        self._table.close()

    def _write_interval(self) -> None:
        names = Metrics.__dataclass_fields__
        means = pool({name: np.stack([m[name] for m in self._pending]) for name in names})
        self._pending.clear()
        rows = [
            {
                "run": run,
                "seed": seed,
                "iteration": self._iteration,
                "env_steps": self._iteration * self.steps_per_iteration,
                **{name: array[run] for name, array in means.items()},
            }
            for run, seed in enumerate(self.seeds)
        ]
        self._table.write(rows)
        self.rows += rows


def pool(metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """[I, R] metrics of I iterations as [R]: counts added, episodes weighed by count, else means.

    NaN where there is nothing to average.
    """
    pooled = {}
    for name, values in metrics.items():
        if name in ("episodes", "invalid_steps"):
            pooled[name] = values.sum(0)
            continue
        episodic = name in ("episode_return", "episode_length")
        weights = metrics["episodes"] if episodic else np.ones_like(values)
        # An explained variance or an episode mean may be missing; a diverged loss must show.
        missing = np.isnan(values) & (episodic or name == "explained_variance")
        weights = np.where(missing, 0, weights)
        total = weights.sum(0)
        mean = np.where(missing, 0.0, values * weights).sum(0) / np.maximum(total, 1)
        pooled[name] = np.where(total > 0, mean, np.nan)
    return pooled


class EvaluationTable:
    """`evaluation.csv`: a row a run and evaluation."""

    def __init__(self, path: Path, seeds: list[int]) -> None:
        self._table = Table(path, EVALUATION_COLUMNS)
        self._seeds = seeds
        self.rows: list[dict[str, Any]] = []

    def add(self, episodes: Episode, iteration: int, env_steps: int) -> list[dict[str, Any]]:
        """Takes host episodes [R, E]; returns the rows written, one a run."""
        rows = []
        for run, seed in enumerate(self._seeds):
            ended = episodes.ended[run]
            score, length = episodes.score[run][ended], episodes.length[run][ended]
            rows.append(
                {
                    "run": run,
                    "seed": seed,
                    "iteration": iteration,
                    "env_steps": env_steps,
                    "return_mean": float(score.mean()) if ended.any() else math.nan,
                    "return_std": float(score.std()) if ended.any() else math.nan,
                    "length_mean": float(length.mean()) if ended.any() else math.nan,
                    "episodes": int(ended.sum()),
                }
            )
        self._table.write(rows)
        self.rows += rows
        return rows

    def close(self) -> None:
        self._table.close()
