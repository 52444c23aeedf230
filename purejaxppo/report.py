"""What a run directory says at the end, read from its own tables: statistics, plots, best setting."""

from __future__ import annotations

import csv
import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from purejaxppo.config import Settings, read_settings
from purejaxppo.files import write_whole
from purejaxppo.loggers import Table, swept_columns
from purejaxppo.plots import draw_curves, draw_sweep
from purejaxppo.rundir import read_summary, write_config
from purejaxppo.sweep import (
    Outcome,
    Run,
    Setting,
    area_under_curve,
    describe,
    make_runs,
    make_settings_of,
)
from purejaxppo.values import ConfigError, to_json

Column = dict[int, dict[int, float]]  # run -> environment steps -> value

_LOSSES = ("policy_loss", "value_loss", "grad_norm")


class Curve(NamedTuple):
    """A column of a table, for the n runs of one setting."""

    steps: np.ndarray  # [S]
    returns: np.ndarray  # [S, n]


class Evaluation(NamedTuple):
    """Of one run, after so many steps."""

    mean: float
    std: float
    episodes: float  # that ended


@dataclass(frozen=True)
class Result:
    """One setting: the learning curves of its runs, but those that diverged, and what they reached."""

    name: str
    setting: Setting
    training: Curve
    evaluation: Curve
    outcome: Outcome

    @property
    def curve(self) -> Curve:
        """Of the evaluations, where there are any."""
        return self.evaluation if len(self.evaluation.steps) else self.training


@dataclass(frozen=True)
class Report:
    """A run directory."""

    path: Path
    settings: Settings
    results: list[Result]  # in the order of the sweep
    evaluations: dict[int, dict[int, Evaluation]]  # run -> environment steps
    invalid_steps: list[int]  # of every run

    @property
    def ranked(self) -> list[Result]:
        """The best setting first."""
        return rank(self.results)


def rank(results: list[Result]) -> list[Result]:
    """The best first."""
    return sorted(results, key=lambda result: result.outcome.score, reverse=True)


def read_report(run_dir: Path, diverged: list[int] | None = None) -> Report:
    """A run directory, from its tables.

    Args:
        diverged: numbers of the runs that did; when not given, those that summary.json names, or whose losses ever
            were no numbers.

    Raises:
        ConfigError: config.yaml or a table cannot be used.
        OSError: a table is missing.
    """
    settings = read_settings(file=run_dir / "config.yaml")
    runs = make_runs(make_settings_of(settings), settings.run)
    training = _read_training(run_dir / "metrics.csv", len(runs), diverged)
    evaluations = _read_evaluations(run_dir / "evaluation.csv")
    means = {
        run: {steps: evaluation.mean for steps, evaluation in own.items()}
        for run, own in evaluations.items()
    }
    evaluated = any(len(points_of(means, run).steps) for run in means)
    seeds = settings.run.num_seeds
    results = [
        _result(runs[first : first + seeds], training, means, evaluated)
        for first in range(0, len(runs), seeds)
    ]
    return Report(run_dir, settings, results, evaluations, training.invalid_steps)


class _Training(NamedTuple):
    """What metrics.csv says of every run."""

    returns: Column
    invalid_steps: list[int]
    diverged: set[int]


def _read_training(path: Path, num_runs: int, diverged: list[int] | None) -> _Training:
    """The table; see `read_report`. Raises ConfigError for a run that there should not be."""
    returns: Column = {}
    invalid_steps, suspected = [0.0] * num_runs, set()
    losses = _LOSSES if diverged is None else ()
    for run, steps, values in read_rows(path, "episode_return", "invalid_steps", *losses):
        if not 0 <= run < num_runs:
            raise ConfigError(f"{path}: has a run {run}; config.yaml says {num_runs} in all")
        returns.setdefault(run, {})[steps] = values[0]
        invalid_steps[run] += values[1] if math.isfinite(values[1]) else 0  # the last cell, cut off
        if not all(map(math.isfinite, values[2:])):
            suspected.add(run)
    if diverged is None:  # what the last update did shows in no loss
        diverged = [*suspected, *(read_summary(path.parent).get("diverged_runs") or ())]
    return _Training(returns, list(map(int, invalid_steps)), set(diverged))


def _read_evaluations(path: Path) -> dict[int, dict[int, Evaluation]]:
    found: dict[int, dict[int, Evaluation]] = {}
    for run, steps, values in read_rows(path, "return_mean", "return_std", "episodes"):
        found.setdefault(run, {})[steps] = Evaluation(*values)
    return found


def _result(runs: list[Run], table: _Training, means: Column, evaluated: bool) -> Result:
    """The result of one setting; its runs that did not diverge have curves.

    Args:
        evaluated: measured by the means of evaluations, and not in training.
    """
    numbers = [run.number for run in runs]
    survivors = [number for number in numbers if number not in table.diverged]
    training = [points_of(table.returns, number) for number in survivors]
    evaluation = [points_of(means, number) for number in survivors]
    bad = np.isin(numbers, list(table.diverged))
    final, area = np.full(len(runs), -np.inf), np.full(len(runs), -np.inf)
    measured = evaluation if evaluated else training
    final[~bad] = [returns[-1] if len(returns) else np.nan for _, returns in measured]
    area[~bad] = [area_under_curve(*points) for points in measured]
    steps = [step for number in numbers for step in table.returns.get(number, ())]
    outcome = Outcome(
        swept=runs[0].setting.swept,
        runs=numbers,
        seeds=[run.seed for run in runs],
        env_steps=max(steps, default=0),
        diverged=bad,
        final=final,
        area=area,
    )
    name, setting = describe(outcome.swept), runs[0].setting
    return Result(name, setting, make_curve(training), make_curve(evaluation), outcome)


def read_rows(path: Path, *columns: str) -> Iterator[tuple[int, int, list[float]]]:
    """Run, environment steps and columns of a table's rows, NaN where a cell is empty.

    A row that was cut off is left out.

    Raises:
        ConfigError: it is no such table.
    """
    with path.open(newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        missing = [name for name in ("run", "env_steps", *columns) if name not in header]
        if missing:
            raise ConfigError(f"{path}: not a table with a column {missing[0]}")
        run, steps, *places = map(header.index, ("run", "env_steps", *columns))
        try:
            for row in rows:
                if len(row) == len(header):
                    yield int(row[run]), int(row[steps]), [float(row[i] or "nan") for i in places]
        except ValueError as error:
            raise ConfigError(f"{path}, line {rows.line_num}: {error}") from None


def points_of(table: Column, run: int) -> Curve:
    """Steps [S] and returns [S] of one run, where it has a number."""
    points = [point for point in table.get(run, {}).items() if math.isfinite(point[1])]
    steps, returns = zip(*points, strict=True) if points else ((), ())
    return Curve(np.array(steps, int), np.array(returns, float))


def make_curve(runs: list[Curve]) -> Curve:
    """The curve of several runs together, from where all have begun to where one ends.

    Between its points a run is on a straight line, as it would be drawn.
    """
    begun = [run for run in runs if len(run.steps)]
    if not begun:
        return Curve(np.zeros(0, int), np.zeros((0, len(runs))))
    steps = np.unique(np.concatenate([run.steps for run in begun]))
    first, last = max(run.steps[0] for run in begun), min(run.steps[-1] for run in begun)
    steps = steps[(steps >= first) & (steps <= last)]
    returns = np.stack([np.interp(steps, run.steps, run.returns) for run in begun], axis=1)
    return Curve(steps, returns)


def write_reports(
    run_dir: Path, facts: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Writes `summary.json`, for a sweep its table and best setting, and the plots.

    Args:
        facts: what the tables do not say; `diverged_runs` is among it.
        say: tells the user in a line why there are no plots, where they cannot be drawn.

    Returns:
        What `summary.json` says.
    """
    report = read_report(run_dir, facts["diverged_runs"])
    summary = {
        "env": report.settings.config.env,
        "evaluation": _last_evaluation(report),
        "seeds": report.results[0].outcome.seeds,
        "env_steps": max(result.outcome.env_steps for result in report.results),
        "invalid_steps": report.invalid_steps,
        **facts,
        "settings": [result.outcome.statistics() for result in report.ranked],
    }
    write_summary(run_dir / "summary.json", summary)
    if report.settings.run.sweep:
        write_sweep(report)
    try:
        draw(report)
    except Exception as error:  # a picture is not worth a training
        again = f"`purejaxppo report {shlex.quote(str(run_dir))}` draws them"
        say(f"no plots: {type(error).__name__}: {error}; {again}")
    return summary


def _last_evaluation(report: Report) -> dict[str, Any]:
    """Return of every run at its end, NaN of one that diverged; empty where not all were evaluated."""
    outcomes = [result.outcome for result in report.results]
    last = {run: outcome.env_steps for outcome in outcomes for run in outcome.runs}
    bad = {run for o in outcomes for run, gone in zip(o.runs, o.diverged, strict=True) if gone}
    complete = all(steps in report.evaluations.get(run, {}) for run, steps in last.items())
    at_end = {run: report.evaluations[run][steps] for run, steps in last.items() if complete}
    values = [math.nan if run in bad else at_end[run].mean for run in at_end]
    ended = {run: int(evaluation.episodes) for run, evaluation in at_end.items()}
    episodes = max(report.settings.run.eval_episodes, *ended.values()) if complete else 0
    finite = [value for value in values if math.isfinite(value)]
    return {
        "return_mean": float(np.mean(finite)) if finite else math.nan,
        "return_std": float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan,
        "return_per_run": values,
        "return_std_per_run": [math.nan if run in bad else at_end[run].std for run in at_end],
        "episodes": episodes,
        "given_up_per_run": [0 if run in bad else episodes - count for run, count in ended.items()],
    }


def compare(reports: list[Report], path: Path) -> dict[str, list[Result]]:
    """Draws the learning curves of several run directories, those of an environment together.

    Returns:
        Of each environment its settings, ranked.
    """
    names = [report.path.resolve().name for report in reports]
    short = len(set(names)) == len(names)
    found: dict[str, list[Result]] = {}
    for report, name in zip(reports, names, strict=True):
        where = name if short else str(report.path)
        found.setdefault(report.settings.config.env, []).extend(
            dataclasses.replace(result, name=", ".join(filter(None, [where, result.name])))
            for result in report.results
        )
    ranked = {env: rank(results) for env, results in found.items()}
    draw_curves(path, ranked)
    return ranked


def write_sweep(report: Report) -> None:
    """`sweep.csv`, a row a run, and `best.yaml`, which trains the best setting as it is."""
    outcomes = [result.outcome for result in report.results]
    names = list(swept_columns(outcomes[0].swept))
    columns = ["final_return", "area_under_curve", "env_steps", "diverged"]
    path = report.path / "sweep.csv"
    path.unlink(missing_ok=True)
    table = Table(path, ["run", "setting", "seed", *names, *columns])
    for number, outcome in enumerate(outcomes):
        same = {"setting": number, "env_steps": outcome.env_steps} | swept_columns(outcome.swept)
        table.write(
            {name: [value] * len(outcome.runs) for name, value in same.items()}
            | {
                "run": outcome.runs,
                "seed": outcome.seeds,
                "final_return": outcome.final.tolist(),
                "area_under_curve": outcome.area.tolist(),
                "diverged": outcome.diverged.tolist(),
            }
        )
    table.close()
    best = report.ranked[0].setting
    run = dataclasses.replace(report.settings.run, sweep=(), samples=None, runs_per_block="auto")
    write_config(report.path / "best.yaml", Settings(run, best.config, best.hyper))


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """A dictionary as JSON, numbers that are not finite as null."""
    write_whole(path, to_json(summary))


def draw(report: Report) -> None:
    """`learning_curve.png`, and `sweep.png` where something was swept."""
    env = report.settings.config.env
    draw_curves(report.path / "learning_curve.png", {env: report.ranked})
    if report.settings.run.sweep:
        draw_sweep(report.path / "sweep.png", f"{env}, PPO", report.results)
