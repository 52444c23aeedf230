"""The plots of a run directory: learning curves, and what a sweep reached."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from purejaxppo.imports import import_matplotlib
from purejaxppo.sweep import bootstrap_interval, iqm, show, span

if TYPE_CHECKING:
    from purejaxppo.report import Curve, Result

_LABELLED = 8  # curves with a colour and a name of their own, the best ones
_COLUMNS = 3  # of panels
_POINTS = 200  # of a curve as it is drawn; each has an interval to compute
_TICKS = 20  # values of an option that are named along an axis
_LEVEL = 6  # beyond which their names stand upright


def draw_curves(path: Path, panels: dict[str, list[Result]]) -> None:
    """Return against environment steps: the interquartile mean over runs and its 95% interval.

    Args:
        panels: the settings of each environment, the best first.
    """
    import_matplotlib()
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7 * columns, 4.5 * rows))
    for number, (env, ranked) in enumerate(panels.items()):
        row, column = divmod(number, columns)
        left, bottom = (column + 0.12) / columns, (rows - 1 - row + 0.12) / rows
        # By its class: a look at the names of all projections reads those in three dimensions, too.
        axes = figure.add_axes(Axes(figure, (left, bottom, 0.84 / columns, 0.8 / rows)))
        axes.set_title(f"{env}, PPO", y=1.0)  # or all ticks are measured to find a place for it
        _draw_panel(axes, ranked)
    figure.savefig(path, dpi=120)


def _draw_panel(axes: Any, ranked: list[Result]) -> None:
    """A setting alone has the curve of its training episodes too; of many, the best have colours."""
    if len(ranked) == 1:
        (only,) = ranked
        _draw_curve(axes, only.training, len(only.outcome.runs), "training episodes", "-")
        if len(only.evaluation.steps):
            _draw_curve(axes, only.evaluation, len(only.outcome.runs), "evaluation", "o-")
    else:
        others = [result for result in ranked[_LABELLED:] if len(result.curve.steps)]
        for result in reversed(others):
            steps, returns = result.curve
            axes.plot(steps, iqm(returns), color="0.85", linewidth=0.7, zorder=0)
        for result in ranked[:_LABELLED]:
            _draw_curve(axes, result.curve, len(result.outcome.runs), result.name, "-")
    runs = {len(result.outcome.runs) for result in ranked}
    of = f", IQM of {span(runs)} runs with 95% interval" if max(runs) > 1 else ""
    axes.set(xlabel="environment steps", ylabel=f"episode return{of}")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")


def _draw_curve(axes: Any, curve: Curve, of: int, label: str, style: str) -> None:
    """A curve with its name, which says how many runs it is of where that is not all of them."""
    there = curve.returns.shape[1] if len(curve.steps) else 0
    label += f" ({there} of {of} runs)" * (there < of)
    label = " " * label.startswith("_") + label  # or Matplotlib keeps it out of the legend
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
    import_matplotlib()
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
    finals: dict[Any, list[np.ndarray]] = defaultdict(list)
    for result in results:
        finals[result.setting.swept[name]].append(result.outcome.final)
    values = list(finals)
    numeric = all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
    )
    places = dict(zip(values, values if numeric else range(len(values)), strict=True))
    points = [(places[value], float(iqm(x))) for value in values for x in finals[value]]
    x, y = np.array(points, float).T
    there = np.isfinite(y)
    axes.plot(x[there], y[there], "o", color="0.6", markersize=4)
    bottom = np.full(len(x[~there]), 0.02)
    axes.plot(x[~there], bottom, "x", color="C3", transform=axes.get_xaxis_transform())
    for value, shared in finals.items():
        together = np.array(shared)
        mean = float(iqm(together.ravel()))
        if together.size > 1 and math.isfinite(mean):
            axes.plot(places[value], mean, "s", color="C0", markersize=5)
            interval = bootstrap_interval(together, iqm, 500)
            if all(map(math.isfinite, interval)):
                axes.plot([places[value]] * 2, interval, "-", color="C0")
    if numeric and _suits_log(np.unique(x)):
        axes.set_xscale("log")
    if not numeric:
        _name_ticks(axes.set_xticks, name, values, upright=len(values) > _LEVEL)
    axes.set(xlabel=name, ylabel="final return")
    axes.grid(alpha=0.3)


def _suits_log(values: np.ndarray) -> bool:
    """Whether values, in order, lie more evenly on a logarithmic axis, and over a decade or more."""
    if values[0] <= 0 or values[-1] < 10 * values[0]:
        return False
    linear, log = (np.diff(x).max() / (x[-1] - x[0]) for x in (values, np.log(values)))
    return bool(log < linear or len(values) == 2)


def _name_ticks(set_ticks: Any, name: str, values: list[Any], upright: bool = False) -> None:
    """Names values at 0, 1 ...; of many, only so many that they can be read."""
    every = -(-len(values) // _TICKS)
    names = [show(name, value) for value in values[::every]]
    set_ticks(range(0, len(values), every), names, rotation=90 if upright else 0)


def _draw_grid(figure: Any, axes: Any, results: list[Result]) -> None:
    """A heat map of a full grid over two options."""
    row_name, column_name = results[0].setting.swept
    rows, columns = _options(results, row_name), _options(results, column_name)
    cells = {tuple(r.setting.swept.values()): float(iqm(r.outcome.final)) for r in results}
    values = np.array([[cells[row, column] for column in columns] for row in rows])
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", origin="lower")
    axes.set(xlabel=column_name, ylabel=row_name, title="IQM")
    _name_ticks(axes.set_xticks, column_name, columns, upright=len(columns) > _LEVEL)
    _name_ticks(axes.set_yticks, row_name, rows)
    figure.colorbar(image, ax=axes)
