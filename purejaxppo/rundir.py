"""A run directory: what lies where in it, whose it is, and which runs it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml

from purejaxppo import checkpoint
from purejaxppo.checkpoint import Checkpoint, Writer
from purejaxppo.config import Settings, read_settings
from purejaxppo.envs import full_name
from purejaxppo.files import write_whole
from purejaxppo.loggers import keep_rows
from purejaxppo.sweep import Run, make_runs, make_settings_of, programs
from purejaxppo.values import ConfigError

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
            env: repeats the environment, and so allows the module of `my_module:MyEnv` to be imported.

        Raises:
            ConfigError: it is not a run directory, or another's code would be run.
        """
        path = Path(path)
        if not (path / "config.yaml").is_file():
            what = (
                "there is no config.yaml in it" if path.is_dir() else "there is no such directory"
            )
            raise ConfigError(f"{path}: not a run directory: {what}")
        settings = read_settings(file=path / "config.yaml")
        named = settings.config.env
        if env is not None and full_name(env) != full_name(named):
            raise ConfigError(f"--env {env}: {path} has {named}")
        if ":" in named and env is None:
            raise ConfigError(
                f"{path}: would run the code of {named}: say --env {named} if you trust it"
            )
        return cls(path, settings)

    @functools.cached_property
    def programs(self) -> list[list[Run]]:
        """Its runs, by the compiled program that they share."""
        return programs(make_runs(make_settings_of(self.settings), self.settings.run))

    @property
    def num_runs(self) -> int:
        """Of all programs."""
        return sum(map(len, self.programs))

    def checkpoints(self, program: int) -> Path:
        """Where those of a program are."""
        return self.path / "checkpoints" / str(program)

    def has_begun(self, program: int) -> bool:
        """Whether there is a checkpoint of a program."""
        return bool(checkpoint.iterations(self.checkpoints(program)))

    def latest(self, program: int) -> Checkpoint:
        """The latest checkpoint of a program.

        Raises:
            ConfigError: there is none, or it is damaged or of another configuration.
        """
        found = checkpoint.load(self.checkpoints(program))
        if found is None:
            runs = self.programs[program]
            of = f" of {runs[0].name}" if len(self.programs) > 1 else ""
            why = " yet"
            if not self.settings.run.keep:
                why = " as it was trained with --keep 0"
            elif read_summary(self.path).get("interrupted") is False:
                why = ": its runs diverged, or it is gone"
            raise ConfigError(f"{self.path}: there is no checkpoint{of}{why}")
        check_options(found.facts["options"], self.settings, found.path)
        return found

    def choose(self, run: int | None, best: bool) -> int:
        """The number of the run that is meant.

        Args:
            run: its number, or None for the only one.
            best: without a number, the one with the highest evaluation.

        Raises:
            ConfigError: there is no such run, or it is not said which.
        """
        count = self.num_runs
        if run is None and count == 1:
            run = 0
        if run is None and best:
            scores = {}
            for number, runs in enumerate(self.programs):
                if self.has_begun(number):
                    found = self.latest(number).arrays["best.score"]
                    scores |= {run.number: score for run, score in zip(runs, found, strict=True)}
            run = max(scores, key=lambda number: scores[number], default=None)
            if run is None or scores[run] == -math.inf:
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


def create(
    settings: Settings, held: contextlib.ExitStack, option: str = "--run-dir"
) -> RunDirectory:
    """A new run directory, with the complete configuration in it, locked while `held` is open.

    Args:
        option: that it was named by.

    Raises:
        ConfigError: it is in use, or cannot be written.
    """
    path = Path(settings.run.run_dir or _new_directory(settings.config.env))
    in_use = ConfigError(f"{option} {path}: in use; give another, or remove it first")
    try:
        if path.exists() and (not path.is_dir() or _holds_files(path)):
            raise in_use
        path.mkdir(parents=True, exist_ok=True)
        held.enter_context(lock(path))
        if _holds_files(path):  # of another, a moment ago
            raise in_use
        write_config(path / "config.yaml", settings)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None
    return RunDirectory(path, settings)


def _holds_files(path: Path) -> bool:
    """Whether there is more in a directory than the lock of a training that came no further."""
    return any(file.name != ".lock" for file in path.iterdir())


def _new_directory(env: str) -> Path:
    """One that nobody else has, named after the environment and the time."""
    plain = re.sub(r"[^\w.-]+", "-", env)
    name = f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path("runs", name)
    try:
        path.parent.mkdir(exist_ok=True)
        for number in itertools.count(2):
            with contextlib.suppress(FileExistsError):  # of another start within the second
                path.mkdir()
                break
            path = path.with_name(f"{name}-{number}")
    except OSError as error:
        raise ConfigError(f"--run-dir {error.filename}: {error.strerror}") from None
    return path


def lock(path: Path) -> IO[bytes]:
    """Keeps other processes from writing to a run directory, until this is closed or we are gone.

    Raises:
        ConfigError: another process has it, or it cannot be written.
    """
    try:
        no_links = getattr(os, "O_NOFOLLOW", 0)
        number = os.open(path / ".lock", os.O_WRONLY | os.O_CREAT | no_links, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    file = os.fdopen(number, "wb")
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
        ConfigError: there is no checkpoint, a table has lost rows, or `run_dir` is in use.
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
    )
    arrays = {
        name: x[:, place : place + 1] if name.startswith("pending.") else x[place : place + 1]
        for name, x in found.arrays.items()
    }
    clocks = ("seconds", "compile_seconds", "evaluation_seconds", "wall_seconds")
    runs = len(directory.programs[program])
    share = {name: found.facts[name] / runs for name in clocks if name in found.facts}
    diverged = [0] if place in found.facts["diverged"] else []
    with contextlib.ExitStack() as held:
        own = create(Settings(options, run.setting.config, run.setting.hyper), held, "--output")
        try:
            for name, kept in found.facts["tables"].items():
                keep_rows(directory.path / name, {number: kept}, own.path / name)
        except (ConfigError, OSError):
            shutil.rmtree(own.path)
            raise
        own_facts = {
            "options": options_of(own.settings),
            "diverged": diverged,
            "blocks": [found.facts["block"]],
        }
        facts = found.facts | share | own_facts
        held.enter_context(Writer(own.checkpoints(0), options.keep, {})).save(arrays, facts)
    return own


def read_summary(path: Path) -> dict[str, Any]:
    """What a directory's summary.json says; nothing where there is none, or none that can be read."""
    try:
        found = json.loads((path / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_results(path: Path) -> bool:
    """Whether anything was trained there, when a command last ended; yes where that cannot be read."""
    return (path / "summary.json").exists() and read_summary(path).get("env_steps") != 0


def discard_unused(path: Path) -> None:
    """Empties the directory of a training that an error ended before it had any results.

    Else the next try would find it in use.
    """
    left = {file.name: file for file in path.iterdir()}
    tables = [left.pop(name) for name in ("metrics.csv", "evaluation.csv") if name in left]
    if left.keys() <= {"config.yaml", ".lock"} and all(
        table.read_bytes().count(b"\n") <= 1 for table in tables
    ):
        for file in (*left.values(), *tables):
            file.unlink()


def write_config(path: Path, settings: Settings) -> None:
    """Complete settings, ready for --config, in one process or with other flags in several."""
    alone = {"distributed": False, "coordinator": None, "num_processes": None, "process_id": None}
    run = dataclasses.replace(settings.run, **alone, run_dir=None, resume=None, any_version=False)
    settings = dataclasses.replace(settings, run=run)
    write_whole(path, yaml.safe_dump(settings.to_dict(), sort_keys=False))


# What decides what is trained; all else may be changed when a training goes on.
_RUN_DECIDES = ("seed", "num_seeds", "sweep", "samples")


def options_of(settings: Settings) -> dict[str, object]:
    """What a checkpoint remembers of the options, as plain JSON."""
    changes = vars(settings.run).keys() - set(_RUN_DECIDES)
    return {name: value for name, value in settings.to_dict().items() if name not in changes}


def common_options(settings: Settings) -> dict[str, object]:
    """What all processes of a training must be given alike: all but where each one is and writes."""
    options = settings.to_dict() | {"resume": settings.run.resume is not None}
    own = ("process_id", "run_dir")
    return {name: value for name, value in options.items() if name not in own}


def check_options(saved: Mapping[str, object], settings: Settings, where: Path) -> None:
    """Raises ConfigError where `settings` have other options, but for the number of steps.

    Args:
        saved: from `options_of`; what is missing, as an older version did not have it, was at its
            default.
        where: they were saved.
    """
    now, defaults = options_of(settings), options_of(Settings())
    swept = any("total_timesteps" in item for item in settings.run.sweep)
    but = "" if swept else " but for --total-timesteps"
    for name in now:
        before = saved.get(name, defaults[name])
        if (swept or name != "total_timesteps") and _json(before) != _json(now[name]):
            has = "sweeps it" if swept and name == "total_timesteps" else f"has {before}"
            raise ConfigError(
                f"--{name.replace('_', '-')} {now[name]}: {where} {has}, and what is trained cannot "
                f"change{but}"
            )


def _json(value: object) -> str:
    """The same of what comes back from JSON, tuples as lists, and of NaN."""
    return json.dumps(value, sort_keys=True)
