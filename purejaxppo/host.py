"""A training from settings to a filled run directory: what is trained, in which order, and where."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import os
import re
import shutil
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from purejaxppo import machine
from purejaxppo.config import ConfigError, Settings
from purejaxppo.display import Display
from purejaxppo.loggers import Tables
from purejaxppo.loop import Training
from purejaxppo.report import write_config, write_reports
from purejaxppo.sweep import make_runs, make_settings_of, programs


def train(settings: Settings) -> int:
    """Trains all runs of valid settings, shows it, and fills the run directory.

    Returns:
        The exit status: 0, or 1 if every run diverged, or 130 if it was interrupted.

    Raises:
        ConfigError: what cannot be known before the environment is: a name, an argument, a head
            that does not fit, a directory in use. Nothing has been compiled by then.
    """
    gc.disable()  # starting makes many objects and no garbage; a training that has compiled turns it on
    try:
        return _train(settings)
    finally:
        gc.enable()


def _train(settings: Settings) -> int:
    started = time.monotonic()
    sys.path.insert(0, os.getcwd())  # for --env my_module:MyEnv, with the console script too
    runs = make_runs(make_settings_of(settings), settings.run)
    machine.configure(settings.run, len(runs))
    memory = machine.memory_for_arrays(settings.run.memory_limit)
    display = Display(quiet=not machine.is_main())
    trainings = [Training(settings.run, group, display, memory) for group in programs(runs)]
    # The block fixes the arithmetic, so it is written down, unless programs have different ones.
    blocks = {training.plan.block for training in trainings}
    if len(blocks) == 1:
        run = dataclasses.replace(settings.run, runs_per_block=blocks.pop())
        settings = dataclasses.replace(settings, run=run)
    run_dir = _make_run_dir(settings)
    display.header(_header(settings, trainings, run_dir))
    facts = _run(trainings, Tables(run_dir, runs[0].setting.swept), display)
    facts["wall_seconds"] = time.monotonic() - started
    summary = write_reports(run_dir, facts)
    display.results(summary, runs)
    display.say(f"written to {run_dir}")
    return 130 if facts["interrupted"] else int(len(facts["diverged_runs"]) == len(runs))


def _run(trainings: list[Training], tables: Tables, display: Display) -> dict[str, Any]:
    """Trains one program after another; returns what the tables do not say."""
    with machine.Interrupt() as interrupt, tables:
        for number, training in enumerate(trainings, 1):
            if not interrupt.check():
                if len(trainings) > 1:
                    display.say(f"program {number} of {len(trainings)}: {training.description}")
                training.run(tables, interrupt)
    seconds = sum(training.seconds for training in trainings)
    return {
        "steps_per_second": sum(training.steps for training in trainings) / max(seconds, 1e-9),
        "compile_seconds": sum(training.compile_seconds for training in trainings),
        "diverged_runs": sorted(run for training in trainings for run in training.diverged_runs),
        "interrupted": interrupt.stopped,
        "versions": machine.versions(),
        "device": machine.device_name(),
    }


def _make_run_dir(settings: Settings) -> Path:
    """The run directory of this process: of one that does not report, it is thrown away."""
    if not machine.is_main():
        (failed,) = machine.agree(False)
        if failed:
            raise ConfigError("process 0 could not begin")
        path = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        write_config(path / "config.yaml", settings)
        return path
    try:
        path = _create_run_dir(settings)
    except ConfigError:
        machine.agree(True)
        raise
    machine.agree(False)
    return path


def _create_run_dir(settings: Settings) -> Path:
    """Creates the run directory, with the complete configuration in it."""
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
    return path


def _header(settings: Settings, trainings: list[Training], run_dir: Path) -> dict[str, str]:
    run, first = settings.run, trainings[0]
    config, env = first.config, first.trainer.setup.env
    steps = config.iterations * config.batch_size
    rounded = "" if steps == config.total_timesteps else f", up from {config.total_timesteps:,}"
    resets = "a new start state at every reset"
    if config.reset_mode == "pool":
        size = min(config.pool_size, config.num_steps)
        resets = (
            f"from a pool of {size} start state{'s'[: size > 1]} for each environment, drawn anew for "
            "every rollout"
        )
    num_runs = sum(len(training.runs) for training in trainings)
    last = f" ... {run.seed + run.num_seeds - 1}" if run.num_seeds > 1 else ""
    seeds = f"seed {run.seed}{last}, in blocks of {first.plan.block}"
    header = {
        "environment": f"{config.env}: {env.observation_space} -> {env.action_space}",
        "resets": resets,
        "parameters": f"{first.num_params:,}",
        "steps": f"{steps:,} in {config.iterations:,} iterations of {config.num_envs} environments"
        f" x {config.num_steps} steps{rounded}",
        "runs": f"{num_runs}, {seeds}",
        "device": f"{first.plan.num_devices * first.plan.shards} x {machine.device_name()}"
        + ", which share the environments of a run" * (first.plan.shards > 1),
        "memory": f"{machine.gib(first.expected_bytes)} planned beside the program itself",
        "directory": str(run_dir),
    }
    if run.sweep:
        header["sweep"] = f"{' '.join(run.sweep)}: {num_runs // run.num_seeds} settings"
    if len(trainings) > 1:
        header["programs"] = f"{len(trainings)}, one after another; these lines are of the first"
    return header
