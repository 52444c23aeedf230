"""What a training shows in the terminal: header, progress, final table."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from purejaxppo.report import bootstrap_interval

# Where the output is no terminal, progress is a line at most so often, in seconds.
_LINE_EVERY = 10.0


class Display:
    """Live where the output is a terminal, a few plain lines where it is not."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._total = total_steps
        self._return = float("nan")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=total_steps, status="")
        self._started = self._last_line = time.monotonic()

    def header(self, rows: dict[str, str]) -> None:
        """What is about to be trained, a line each."""
        width = max(map(len, rows))
        for name, value in rows.items():
            self._console.print(f"[bold]{name:<{width}}[/bold]  {value}")

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text)

    def start(self) -> None:
        """Begins to show progress."""
        self._started = self._last_line = time.monotonic()
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
            left = (now - self._started) * (self._total - steps) / max(steps, 1)
            self._console.print(
                f"{steps:>12,} / {self._total:,} steps  {status}  {left:.0f} s left"
            )

    def stop(self) -> None:
        """Ends the live part; may be called twice."""
        self._progress.stop()

    def results(self, summary: dict[str, Any], seeds: list[int]) -> None:
        """The final table, from the contents of summary.json."""
        evaluation = summary["evaluation"]
        if evaluation["return_per_run"]:
            self._evaluation(evaluation, seeds)
        self._console.print(
            f"{summary['env_steps']:,} steps a run in {summary['wall_seconds']:.1f} s "
            f"({summary['steps_per_second']:,.0f} steps/s over all runs, "
            f"{summary['compile_seconds']:.1f} s to compile)"
        )
        for seed in summary["diverged_runs"]:
            self._console.print(f"[bold red]diverged[/bold red]: the run with seed {seed}")

    def _evaluation(self, evaluation: dict[str, Any], seeds: list[int]) -> None:
        table = Table(title=f"evaluation, {evaluation['episodes']} episodes a run")
        for column in ("seed", "return", "std"):
            table.add_column(column, justify="right")
        means, stds = evaluation["return_per_run"], evaluation["return_std_per_run"]
        shown = min(len(seeds), 10)
        for row in zip(seeds[:shown], means, stds, strict=False):
            table.add_row(str(row[0]), f"{row[1]:.2f}", f"{row[2]:.2f}")
        if shown < len(seeds):
            table.add_row("...", "...", "...")
        self._console.print(table)
        if len(seeds) > 1:
            low, high = bootstrap_interval(np.array(means))
            self._console.print(
                f"mean over {len(seeds)} seeds {np.mean(means):.2f}, "
                f"95% interval {low:.2f} ... {high:.2f}"
            )
