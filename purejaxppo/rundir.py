"""A run directory: what lies where in it, whose it is, and which runs it holds."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import math
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import yaml

from purejaxppo import checkpoint
from purejaxppo.checkpoint import Checkpoint, Writer
from purejaxppo.config import ConfigError, Settings, load_settings
from purejaxppo.sweep import Run, make_runs, make_settings_of, programs

with contextlib.suppress(ImportError):  # not on Windows, where nothing is locked
    import fcntl


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a training that has begun."""

    path: Path
    settings: Settings

    @classmethod
    def open(cls, path: str | Path, env: str | None = None) -> RunDirectory:
        """What a directory says; nothing in it is run.

        Args:
            env: repeats an environment `my_module:MyEnv`, and so allows its module to be imported.

        Raises:
            ConfigError: it is not a run directory, or another's code would be run.
        """
        path = Path(path)
        if not (path / "config.yaml").is_file():
            what = (
                "there is no config.yaml in it" if path.is_dir() else "there is no such directory"
            )
            raise ConfigError(f"{path}: not a run directory: {what}")
        settings = load_settings(file=path / "config.yaml")
        named = settings.config.env
        if ":" in named and env != named:
            raise ConfigError(
                f"{path}: would run the code of {named}: say --env {named} if you trust it"
            )
        return cls(path, settings)

    @functools.cached_property
    def programs(self) -> list[list[Run]]:
        """Its runs, by the compiled program that they share."""
        return programs(make_runs(make_settings_of(self.settings), self.settings.run))

    @property
    def numbers(self) -> list[int]:
        """Of all its runs."""
        return sorted(run.number for runs in self.programs for run in runs)

    def checkpoints(self, program: int) -> Path:
        """Where those of a program are."""
        return self.path / "checkpoints" / str(program)

    def latest(self, program: int) -> Checkpoint:
        """The latest checkpoint of a program.

        Raises:
            ConfigError: there is none, or it is damaged or of another configuration.
        """
        found = checkpoint.load(self.checkpoints(program))
        if found is None:
            raise ConfigError(f"{self.path}: there is no checkpoint yet")
        check_options(found, self.settings)
        return found

    def choose(self, run: int | None, best: bool) -> int:
        """The number of the run that is meant.

        Args:
            run: its number, or None for the only one.
            best: without a number, the one with the highest evaluation.

        Raises:
            ConfigError: there is no such run, or it is not said which.
        """
        count = len(self.numbers)
        if run is None and count == 1:
            run = 0
        if run is None and best:
            scores = {}
            for number, runs in enumerate(self.programs):
                found = self.latest(number).arrays["best.score"]
                scores |= {run.number: score for run, score in zip(runs, found, strict=True)}
            run = max(scores, key=lambda number: scores[number])
            if scores[run] == -math.inf:
                raise ConfigError(f"{self.path}: no run was evaluated, so none is the best")
        if run is None:
            raise ConfigError(
                f"{self.path} has {count} runs: give --run 0 ... {count - 1}, or --best for the best"
            )
        if not 0 <= run < count:
            raise ConfigError(f"--run {run}: {self.path} has runs 0 ... {count - 1}")
        return run

    def place(self, number: int) -> tuple[int, int]:
        """The program of a run, and its place there."""
        places = {
            run.number: (program, place)
            for program, runs in enumerate(self.programs)
            for place, run in enumerate(runs)
        }
        return places[number]


def create(settings: Settings) -> RunDirectory:
    """A new run directory, with the complete configuration in it.

    Raises:
        ConfigError: it is in use, or cannot be written.
    """
    name = settings.run.run_dir
    if name is None:
        env = re.sub(r"[^\w.-]+", "-", settings.config.env)
        name = f"runs/{env}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path(name)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--run-dir {path}: in use; give another, or remove it first")
        path.mkdir(parents=True, exist_ok=True)
        write_config(path / "config.yaml", settings)
    except OSError as error:
        raise ConfigError(f"--run-dir {path}: {error.strerror}") from None
    return RunDirectory(path, settings)


def lock(path: Path) -> IO[str]:
    """Keeps other processes from writing to a run directory, until this is closed or we are gone.

    Raises:
        ConfigError: another process has it, or it cannot be written.
    """
    try:
        file = (path / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"{path}: another process is training here") from None
    except (NameError, OSError):
        pass  # a system or a file system without locks
    return file


def extract(directory: RunDirectory, number: int, run_dir: str) -> RunDirectory:
    """One run of a sweep as a run directory of its own, which can be gone on with.

    Raises:
        ConfigError: there is no checkpoint, or `run_dir` is in use.
    """
    program, place = directory.place(number)
    found, run = directory.latest(program), directory.programs[program][place]
    options = dataclasses.replace(
        directory.settings.run,
        seed=run.seed,
        num_seeds=1,
        sweep=(),
        samples=None,
        run_dir=run_dir,
        runs_per_block=found.facts["block"],
    )
    own = create(Settings(options, run.setting.config, run.setting.hyper))
    sizes = [
        _extract_rows(directory.path / name, size, number, own.path / name)
        for name, size in zip(("metrics.csv", "evaluation.csv"), found.facts["tables"], strict=True)
    ]
    arrays = {
        name: x[:, place : place + 1] if name.startswith("pending.") else x[place : place + 1]
        for name, x in found.arrays.items()
    }
    diverged = [0] if place in found.facts["diverged"] else []
    about = {**found.facts, "options": options_of(own.settings)}
    with Writer(own.checkpoints(0), options.keep, about) as writer:
        writer.save(arrays, {**about, "tables": sizes, "diverged": diverged})
    return own


def _extract_rows(path: Path, size: int, number: int, target: Path) -> int:
    """Copies a run's rows of a table's first bytes, as those of run 0; returns their size."""
    rows = csv.DictReader(path.read_bytes()[:size].decode().splitlines())
    columns = [name for name in rows.fieldnames or () if not name.startswith("sweep.")]
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row | {"run": 0} for row in rows if int(row["run"]) == number)
    return target.stat().st_size


def write_config(path: Path, settings: Settings) -> None:
    """Complete settings, ready for --config, in one process or with other flags in several."""
    alone = {"distributed": False, "coordinator": None, "num_processes": None, "process_id": None}
    run = dataclasses.replace(settings.run, **alone, resume=None, any_version=False)
    settings = dataclasses.replace(settings, run=run)
    write_whole(path, yaml.safe_dump(settings.to_dict(), sort_keys=False))


def write_whole(path: Path, text: str) -> None:
    """A file that is never seen half written."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


# What decides what is trained; all else may be changed when a training goes on.
_RUN_DECIDES = ("seed", "num_seeds", "sweep", "samples")


def options_of(settings: Settings) -> dict[str, object]:
    """What a checkpoint remembers of the options, as plain JSON."""
    options = settings.to_dict()
    of_run = {field.name for field in dataclasses.fields(settings.run)} - set(_RUN_DECIDES)
    return {name: value for name, value in options.items() if name not in of_run}


def check_options(found: Checkpoint, settings: Settings) -> None:
    """Raises ConfigError where a checkpoint is of other options, but for the number of steps."""
    saved, now = found.facts["options"], options_of(settings)
    for name in now:
        if name != "total_timesteps" and _plain(saved.get(name)) != _plain(now[name]):
            raise ConfigError(
                f"--{name.replace('_', '-')} {now[name]}: {found.path} was trained with "
                f"{saved.get(name)}, and only --total-timesteps can change"
            )


def _plain(value: object) -> object:
    """As it comes back from JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
