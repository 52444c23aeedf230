"""What a run directory says at the end: statistics over runs, `summary.json`, the learning curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np


def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis (Agarwal et al., 2021): [..., R] -> [...].

    The mean of the middle half; runs at its edges count in part, so it is smooth in R.
    """
    ordered = np.sort(values, axis=-1)
    size = ordered.shape[-1]
    edges = np.arange(size + 1) / size
    overlap = np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25)
    weights = np.maximum(overlap, 0.0)
    return (ordered * weights).sum(-1) / weights.sum()


def bootstrap_interval(
    values: np.ndarray, statistic: Any = np.mean, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic over runs [R]; always the same for the same R.

    Args:
        statistic: called as statistic(array [resamples, R], axis=-1) or, for `iqm`, with the array.
    """
    rng = np.random.default_rng(0)
    samples = values[rng.integers(0, len(values), (resamples, len(values)))]
    estimates = iqm(samples) if statistic is iqm else statistic(samples, axis=-1)
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """A dictionary as JSON, numbers that are not finite as null."""
    path.write_text(json.dumps(_plain(summary), indent=2) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def plot_learning_curve(
    path: Path,
    title: str,
    metrics: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
) -> None:
    """Return against environment steps: the interquartile mean over runs and its 95% interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.add_axes((0.12, 0.12, 0.84, 0.8))
    for rows, column, label, style in (
        (metrics, "episode_return", "training episodes", "-"),
        (evaluations, "return_mean", "evaluation", "o-"),
    ):
        steps, returns = curve(rows, column)
        if not len(steps):
            continue
        runs = returns.shape[1]
        name = f"{label}, IQM of {runs} runs with 95% interval" if runs > 1 else label
        (line,) = axes.plot(steps, iqm(returns), style, label=name, markersize=3)
        if runs > 1:
            low, high = zip(*(bootstrap_interval(row, iqm, 500) for row in returns), strict=True)
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    axes.set(title=title, xlabel="environment steps", ylabel="episode return")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)


def curve(rows: list[dict[str, Any]], column: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [S] and values [S, R] of a column, where every run has a number."""
    by_step: dict[int, list[float]] = {}
    for row in rows:
        by_step.setdefault(row["env_steps"], []).append(float(row[column]))
    complete = {step: v for step, v in by_step.items() if all(map(math.isfinite, v))}
    return np.array(list(complete)), np.array(list(complete.values()))
