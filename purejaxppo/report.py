"""What a run directory says at the end, read from its own tables: statistics, plots, best setting."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from purejaxppo.config import Settings, read_settings
from purejaxppo.loggers import Table, swept_columns
from purejaxppo.rundir import write_config, write_whole
from purejaxppo.sweep import (
    Outcome,
    Run,
    Setting,
    area_under_curve,
    bootstrap_interval,
    describe,
    iqm,
    make_runs,
    make_settings_of,
    show,
    span,
)
from purejaxppo.values import ConfigError

Column = dict[int, dict[int, float]]  # run -> environment steps -> value

_LABELLED = 8  # curves with a colour and a name of their own, the best ones
_POINTS = 200  # of a curve as it is drawn; each has an interval to compute


class Curve(NamedTuple):
    """A column of a table, for the n runs of one setting."""

    steps: np.ndarray  # [S]
    returns: np.ndarray  # [S, n]


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
    evaluation: Column  # mean returns

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
        diverged: numbers of the runs that did; when not given, those whose losses ever were no numbers.

    Raises:
        ConfigError: config.yaml or a table cannot be used.
        OSError: a table is missing.
    """
    settings = read_settings(file=run_dir / "config.yaml")
    tables = (
        read_column(run_dir / "metrics.csv", "episode_return"),
        read_column(run_dir / "evaluation.csv", "return_mean"),
    )
    if diverged is None:
        diverged = _read_diverged(run_dir)
    seeds = settings.run.num_seeds
    runs = make_runs(make_settings_of(settings), settings.run)
    groups = [runs[first : first + seeds] for first in range(0, len(runs), seeds)]
    evaluated = any(len(points_of(tables[1], run).steps) for run in tables[1])
    results = [_result(group, tables, diverged, evaluated) for group in groups]
    return Report(run_dir, settings, results, evaluation=tables[1])


def _read_diverged(run_dir: Path) -> list[int]:
    names = ("policy_loss", "value_loss", "grad_norm")
    columns = [read_column(run_dir / "metrics.csv", name) for name in names]
    return [
        run
        for run in columns[0]
        if not all(np.isfinite(list(column[run].values())).all() for column in columns)
    ]


def _result(
    runs: list[Run], tables: tuple[Column, Column], diverged: list[int], evaluated: bool
) -> Result:
    """The result of one setting; its runs that did not diverge have curves.

    Args:
        evaluated: measured by the second table, evaluations, and not by the first.
    """
    numbers = [run.number for run in runs]
    survivors = [number for number in numbers if number not in diverged]
    training, evaluation = ([points_of(table, n) for n in survivors] for table in tables)
    bad = np.isin(numbers, diverged)
    final, area = np.full(len(runs), -np.inf), np.full(len(runs), -np.inf)
    measured = evaluation if evaluated else training
    final[~bad] = [returns[-1] if len(returns) else np.nan for _, returns in measured]
    area[~bad] = [area_under_curve(*points) for points in measured]
    steps = [step for number in numbers for step in tables[0].get(number, ())]
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


def read_column(path: Path, column: str) -> Column:
    """A column of a table, NaN where a cell is empty; a row that was cut off is left out.

    Raises:
        ConfigError: it is no such table.
    """
    table: Column = {}
    with path.open(newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        try:
            run, steps, value = (header.index(name) for name in ("run", "env_steps", column))
        except ValueError:
            raise ConfigError(f"{path}: not a table with a column {column}") from None
        try:
            for row in rows:
                if len(row) == len(header):
                    returns = table.setdefault(int(row[run]), {})
                    returns[int(row[steps])] = float(row[value] or "nan")
        except ValueError as error:
            raise ConfigError(f"{path}, line {rows.line_num}: {error}") from None
    return table


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


def write_reports(run_dir: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes `summary.json`, the plots and, for a sweep, its table and best setting.

    Args:
        facts: what the tables do not say; `diverged_runs` is among it.

    Returns:
        What `summary.json` says.
    """
    report = read_report(run_dir, facts["diverged_runs"])
    summary = {
        "env": report.settings.config.env,
        "evaluation": _last_evaluation(report),
        "seeds": report.results[0].outcome.seeds,
        "env_steps": max(result.outcome.env_steps for result in report.results),
        "invalid_steps": _invalid_steps(report),
        **facts,
        "settings": [result.outcome.statistics() for result in report.ranked],
    }
    write_summary(run_dir / "summary.json", summary)
    draw(report)
    if report.settings.run.sweep:
        write_sweep(report)
    return summary


def _invalid_steps(report: Report) -> list[int]:
    """Of every run, in order."""
    table = read_column(report.path / "metrics.csv", "invalid_steps")
    runs = [run for result in report.results for run in result.outcome.runs]
    return [int(sum(table.get(run, {}).values())) for run in runs]


def _last_evaluation(report: Report) -> dict[str, Any]:
    """Return of every run at its end, NaN of one that diverged; empty where not all were evaluated."""
    table = report.path / "evaluation.csv"
    means, stds = report.evaluation, read_column(table, "return_std")
    counts = read_column(table, "episodes")
    outcomes = [result.outcome for result in report.results]
    last = {run: outcome.env_steps for outcome in outcomes for run in outcome.runs}
    bad = {run for o in outcomes for run, gone in zip(o.runs, o.diverged, strict=True) if gone}
    complete = all(steps in means.get(run, {}) for run, steps in last.items())
    at_end = list(last.items()) if complete else []
    values = [math.nan if run in bad else means[run][steps] for run, steps in at_end]
    ended = [int(counts[run][steps]) for run, steps in at_end]
    episodes = max(report.settings.run.eval_episodes, *ended) if complete else 0
    finite = [value for value in values if math.isfinite(value)]
    return {
        "return_mean": float(np.mean(finite)) if finite else math.nan,
        "return_std": float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan,
        "return_per_run": values,
        "return_std_per_run": [
            math.nan if run in bad else stds[run][steps] for run, steps in at_end
        ],
        "episodes": episodes,
        "given_up_per_run": [
            0 if run in bad else episodes - count
            for (run, _), count in zip(at_end, ended, strict=True)
        ],
    }


def compare(reports: list[Report], path: Path) -> list[Result]:
    """Draws the learning curves of several run directories together; returns them ranked.

    Raises:
        ConfigError: they did not train the same environment.
    """
    names = sorted({report.settings.config.env for report in reports})
    if len(names) > 1:
        raise ConfigError(
            f"returns of different environments cannot be compared: {', '.join(names)}"
        )
    short = len({report.path.name for report in reports}) == len(reports)
    results = [
        dataclasses.replace(result, name=", ".join(filter(None, [where, result.name])))
        for report in reports
        for where in [report.path.name if short else str(report.path)]
        for result in report.results
    ]
    ranked = rank(results)
    draw_curves(path, f"{names[0]}, PPO", ranked)
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
        table.write(
            [
                {
                    "run": run,
                    "setting": number,
                    "seed": outcome.seeds[i],
                    **swept_columns(outcome.swept),
                    "final_return": outcome.final[i],
                    "area_under_curve": outcome.area[i],
                    "env_steps": outcome.env_steps,
                    "diverged": bool(outcome.diverged[i]),
                }
                for i, run in enumerate(outcome.runs)
            ]
        )
    table.close()
    best = report.ranked[0].setting
    run = dataclasses.replace(report.settings.run, sweep=(), samples=None, runs_per_block="auto")
    write_config(report.path / "best.yaml", Settings(run, best.config, best.hyper))


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """A dictionary as JSON, numbers that are not finite as null."""
    write_whole(path, json.dumps(_plain(summary), indent=2) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def draw(report: Report) -> None:
    """`learning_curve.png`, and `sweep.png` where something was swept."""
    title = f"{report.settings.config.env}, PPO"
    draw_curves(report.path / "learning_curve.png", title, report.ranked)
    if report.settings.run.sweep:
        draw_sweep(report.path / "sweep.png", title, report.results)


def draw_curves(path: Path, title: str, ranked: list[Result]) -> None:
    """Return against environment steps: the interquartile mean over runs and its 95% interval.

    A setting alone has the curve of its training episodes too; of many, the best have colours.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.add_axes((0.12, 0.12, 0.84, 0.8))
    if len(ranked) == 1:
        (only,) = ranked
        _draw_curve(axes, only.training, len(only.outcome.runs), "training episodes", "-")
        if len(only.evaluation.steps):
            _draw_curve(axes, only.evaluation, len(only.outcome.runs), "evaluation", "o-")
    else:
        others = [result for result in ranked[_LABELLED:] if len(result.curve.steps)]
        for result in reversed(others):
            axes.plot(result.curve.steps, iqm(result.curve.returns), color="0.85", linewidth=0.7)
        for result in ranked[:_LABELLED]:
            _draw_curve(axes, result.curve, len(result.outcome.runs), result.name, "-")
    runs = {len(result.outcome.runs) for result in ranked}
    of = f", IQM of {span(runs)} runs with 95% interval" if max(runs) > 1 else ""
    axes.set(xlabel="environment steps", ylabel=f"episode return{of}")
    axes.set_title(title, y=1.0)  # or all ticks are measured to find a place for it
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_curve(axes: Any, curve: Curve, of: int, label: str, style: str) -> None:
    """A curve with its name, which says how many runs it is of where that is not all of them."""
    there = curve.returns.shape[1] if len(curve.steps) else 0
    label += f" ({there} of {of} runs)" * (there < of)
    if not there:
        axes.plot([], [], style, label=label)
        return
    points = np.linspace(0, len(curve.steps) - 1, min(len(curve.steps), _POINTS)).astype(int)
    steps, returns = curve.steps[points], curve.returns[points]
    (line,) = axes.plot(steps, iqm(returns), style, label=label, markersize=3)
    if returns.shape[1] > 1:
        low, high = zip(*(bootstrap_interval(row, iqm, 500) for row in returns), strict=True)
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)


def draw_sweep(path: Path, title: str, results: list[Result]) -> None:
    """Final return against each swept option, and a heat map where two make a full grid."""
    from matplotlib.figure import Figure

    names = list(results[0].setting.swept)
    sizes = [len(_options(results, name)) for name in names]
    is_grid = len(names) == 2 and math.prod(sizes) == len(results) and min(sizes) > 1
    panels = len(names) + is_grid
    figure = Figure(figsize=(4.2 * panels, 4), layout="constrained")
    all_axes = figure.subplots(1, panels, squeeze=False)[0]
    for axes, name in zip(all_axes, names, strict=False):
        _draw_option(axes, name, results)
    if is_grid:
        _draw_grid(figure, all_axes[-1], results)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _options(results: list[Result], name: str) -> list[Any]:
    """The values of an option, in the order of the sweep."""
    return list(dict.fromkeys(result.setting.swept[name] for result in results))


def _draw_option(axes: Any, name: str, results: list[Result]) -> None:
    """A point a setting, a cross at the bottom where it has no return, as of runs that diverged.

    And the runs that share a value together, with their interval.
    """
    values = _options(results, name)
    numeric = all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
    )
    for place, value in enumerate(values):
        x = value if numeric else place
        finals = np.array([r.outcome.final for r in results if r.setting.swept[name] == value])
        axes.plot([x] * len(finals), iqm(finals), "o", color="0.6", markersize=4)
        if not np.isfinite(iqm(finals)).all():
            axes.plot(x, 0.02, "x", color="C3", transform=axes.get_xaxis_transform())
        interval = bootstrap_interval(finals, iqm, 500)
        if finals.size > 1 and all(map(math.isfinite, interval)):
            axes.plot([x, x], interval, "-", color="C0")
            axes.plot(x, iqm(finals.ravel()), "s", color="C0", markersize=5)
    if numeric and min(values) > 0 and max(values) >= 10 * min(values):
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(range(len(values)), [show(name, v) for v in values])
    axes.set(xlabel=name, ylabel="final return")
    axes.grid(alpha=0.3)


def _draw_grid(figure: Any, axes: Any, results: list[Result]) -> None:
    """A heat map of a full grid over two options."""
    row_name, column_name = results[0].setting.swept
    rows, columns = _options(results, row_name), _options(results, column_name)
    cells = {tuple(r.setting.swept.values()): float(iqm(r.outcome.final)) for r in results}
    values = np.array([[cells[row, column] for column in columns] for row in rows])
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", origin="lower")
    axes.set(xlabel=column_name, ylabel=row_name, title="IQM")
    axes.set_xticks(range(len(columns)), [show(column_name, v) for v in columns])
    axes.set_yticks(range(len(rows)), [show(row_name, v) for v in rows])
    figure.colorbar(image, ax=axes)
