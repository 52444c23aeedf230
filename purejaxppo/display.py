"""What a training shows in the terminal: header, progress, final table."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from purejaxppo.evaluate import MAX_STEPS
from purejaxppo.policy import Policy
from purejaxppo.sweep import Run, bootstrap_interval, describe, span
from purejaxppo.types import Episode

# Where the output is no terminal, progress is a line at most so often, in seconds.
_LINE_EVERY = 10.0
_WIDTH = 160  # that tables may take there
_SHOWN = 10  # rows of a table; the rest is in the run directory


class _Output:
    """Standard output for as long as somebody takes it: a training goes on without its terminal or pipe."""

    def __init__(self) -> None:
        self._file = sys.stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        self._while_taken(self._file.write, text)

    def flush(self) -> None:
        self._while_taken(self._file.flush)

    def _while_taken(self, action: Callable[..., Any], *arguments: str) -> None:
        try:
            action(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # but a full disk, which is an error
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())


class Display:
    """Live where the output is a terminal, a few plain lines where it is not."""

    def __init__(self, quiet: bool = False) -> None:
        out: Any = _Output()
        self._console = Console(file=out, highlight=False, emoji=False, soft_wrap=True, quiet=quiet)
        if not self._console.is_terminal and "COLUMNS" not in os.environ:
            self._console.width = _WIDTH
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("training", status="")

    def header(self, rows: dict[str, str]) -> None:
        """What is about to be trained, a line each."""
        width = max(map(len, rows))
        for name, value in rows.items():
            self._console.print(f"[bold]{name:<{width}}[/bold]  {escape(value)}")

    def say(self, text: str) -> None:
        """One line, as it is."""
        self._console.print(text, markup=False)

    def start(self, total_steps: int, done: int = 0) -> None:
        """Begins to show progress, with `done` steps of each run behind it."""
        self._total, self._done, self._return = total_steps, done, float("nan")
        self._started = self._last_line = time.monotonic()
        self._progress.reset(self._task, total=total_steps, completed=done, status="")
        if self._console.is_terminal:
            self._progress.start()

    def update(self, steps: int, episode_return: float, steps_per_second: float) -> None:
        """Progress after `steps` of each run, with the return of the episodes that ended lately."""
        if np.isfinite(episode_return):
            self._return = episode_return
        known = f"{self._return:.2f}" if np.isfinite(self._return) else "no episode ended yet"
        status = f"return {known}  {steps_per_second:,.0f} steps/s"
        if self._console.is_terminal:
            self._progress.update(self._task, completed=steps, status=status)
            return
        now = time.monotonic()
        if now - self._last_line >= _LINE_EVERY or steps >= self._total:
            self._last_line = now
            left = (now - self._started) * (self._total - steps) / max(steps - self._done, 1)
            self._console.print(
                f"{steps:>12,} / {self._total:,} steps  {status}  {left:.0f} s left"
            )

    def stop(self) -> None:
        """Ends the live part; may be called twice."""
        self._progress.stop()

    def results(self, summary: dict[str, Any], runs: list[Run]) -> None:
        """The final tables, from the contents of summary.json."""
        evaluation = summary["evaluation"]
        settings = summary["settings"]
        if len(settings) > 1:
            self.ranking([(describe(setting["swept"]), setting) for setting in settings])
            means = enumerate(evaluation["return_per_run"])
            never = [n for n, mean in means if np.isnan(mean)]
            self._named(
                "no episode ended", [runs[n] for n in never if n not in summary["diverged_runs"]]
            )
        elif evaluation["return_per_run"]:
            self._evaluation(evaluation, runs, summary["diverged_runs"])
        steps = {run: setting["env_steps"] for setting in settings for run in setting["runs"]}
        parts = f"{summary['compile_seconds']:.1f} s of them to compile"
        if evaluation["return_per_run"]:
            parts += f" and {summary['evaluation_seconds']:.1f} s to evaluate"
        self._console.print(
            f"{span(steps.values())} steps a run ({summary['steps_per_second']:,.0f} steps/s over all runs); "
            f"it took {summary['wall_seconds']:.1f} s, {parts}"
        )
        diverged, invalid = summary["diverged_runs"], summary["invalid_steps"]
        mostly = [n for n in steps if invalid[n] > steps[n] / 2 and n not in diverged]
        if given_up := sum(evaluation["given_up_per_run"]):
            self._console.print(_given_up(given_up))
        self._named("diverged", [runs[number] for number in diverged])
        self._named("most steps were invalid", [runs[number] for number in sorted(mostly)])

    def _named(self, what: str, runs: list[Run]) -> None:
        """The runs that something is wrong with."""
        for run in runs[:_SHOWN]:
            self._console.print(f"[bold red]{what}[/bold red]: {escape(run.name)}")
        if len(runs) > _SHOWN:
            self._console.print(f"[bold red]{what}[/bold red]: {len(runs) - _SHOWN} more")

    def _evaluation(self, evaluation: dict[str, Any], runs: list[Run], diverged: list[int]) -> None:
        table = Table(title=f"evaluation, {evaluation['episodes']} episodes a run")
        for column in ("seed", "return", "std"):
            table.add_column(column, justify="right")
        means, stds = evaluation["return_per_run"], evaluation["return_std_per_run"]
        for run, mean, std in list(zip(runs, means, stds, strict=True))[:_SHOWN]:
            why_none = "diverged" if run.number in diverged else "no episode ended"
            cells = [f"{mean:.2f}", f"{std:.2f}"] if np.isfinite(mean) else [why_none, ""]
            table.add_row(str(run.seed), *cells)
        self._print(table, len(runs))
        self._over_seeds(means)

    def _over_seeds(self, means: list[float]) -> None:
        """Of the runs of a setting together, those that have a return."""
        finite = np.array([mean for mean in means if np.isfinite(mean)])
        if len(finite) > 1:
            low, high = bootstrap_interval(finite)
            self._console.print(
                f"mean over {len(finite)} seeds {np.mean(finite):.2f}, "
                f"95% interval {low:.2f} ... {high:.2f}"
            )

    def played(self, episodes: list[tuple[Policy, Episode]], left_out: int) -> None:
        """What policies reached in episodes [E]; those that did not end do not count.

        Args:
            left_out: runs that have none.
        """
        after = sorted({policy.iteration for policy, _ in episodes})
        last = f" ... {after[-1]:,}" if len(after) > 1 else ""
        title = f"{len(episodes[0][1].ended)} episodes a run, after iteration {after[0]:,}{last}"
        table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("", "return", "std", "95% interval", "range", "length"):
            table.add_column(column, justify="right", overflow="fold")
        unfinished, means = 0, []
        for policy, played in episodes:
            score, length = (np.asarray(x)[played.ended] for x in (played.score, played.length))
            unfinished += int((~played.ended).sum())
            cells = ["no episode ended"] + [""] * 4
            if len(score):
                means.append(float(score.mean()))
                cells = [f"{x:.2f}" for x in (score.mean(), score.std())]
                cells += [_cell(*bootstrap_interval(score)), f"{score.min():g} ... {score.max():g}"]
                cells += [f"{length.mean():.1f}, {length.min()} ... {length.max()}"]
            table.add_row(escape(policy.run.name), *cells)
        self._console.print(table)
        if len({describe(policy.run.setting.swept) for policy, _ in episodes}) == 1:
            self._over_seeds(means)
        if left_out:
            self._console.print(f"{left_out} runs diverged or have not begun")
        if unfinished:
            self._console.print(_given_up(unfinished))

    def ranking(
        self, settings: list[tuple[str, dict[str, Any]]], env: str = "", most: int = _SHOWN
    ) -> None:
        """Names and statistics of an environment's settings, the best first, at most so many."""
        seeds = span(len(setting["runs"]) for _, setting in settings)
        plural, plurals = "s"[: len(settings) > 1], "s"[: seeds != "1"]
        title = f"{len(settings)} setting{plural} x {seeds} seed{plurals}"
        table = Table(title=f"{env}: {title}" if env else title)
        table.add_column("", overflow="fold")
        for column in ("IQM", "95% interval", "mean", "area", "diverged"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, setting in settings[:most]:
            table.add_row(
                escape(name),
                _cell(setting["iqm"]),
                _cell(*setting["iqm_interval"]),
                _cell(setting["mean"]),
                _cell(setting["area_under_curve"]),
                str(setting["diverged"] or ""),
            )
        self._print(table, len(settings))

    def _print(self, table: Table, rows: int) -> None:
        """A table, with a last row of dots where it does not show all."""
        if rows > len(table.rows):
            table.add_row(*["..."] * len(table.columns))
        self._console.print(table)


def _given_up(episodes: int) -> str:
    return (
        f"{episodes} episodes were given up after {MAX_STEPS:,} steps, or ended by an invalid one, "
        "and do not count"
    )


def _cell(*bounds: float) -> str:
    """A number or an interval; nothing where there is none."""
    return "" if np.isnan(bounds).any() else " ... ".join(f"{bound:.4g}" for bound in bounds)
