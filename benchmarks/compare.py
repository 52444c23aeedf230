"""Steps per second and start-up beside other trainers, in turn, on the same cores.

    python -m benchmarks.peers DIRECTORY       # installs them, once
    python -m benchmarks.compare DIRECTORY
    python -m benchmarks.compare DIRECTORY --only start-up --repeats 5

Same environment, networks of 2 x 64 tanh units, 128 steps, 4 epochs of 4 minibatches, float32. Where
there is an accelerator, its works are measured in place of those of cores. Nothing else should be running. Brax's own PPO is compared in `benchmarks.brax_ppo`.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers, shared
from benchmarks.shared import README, load, save, with_table
from purejaxppo import cli, machine
from purejaxppo.config import Config

NUM_STEPS = 128
SETTINGS = [
    "--num-steps", str(NUM_STEPS), "--update-epochs", "4", "--num-minibatches", "4",
    "--cnn-layers", "flat", "--torso-layers", "64,64", "--shared-torso", "false", "--activation",
    "tanh", "--no-normalize-observations", "--no-normalize-rewards", "--eval-episodes", "0",
]  # fmt: skip
START_UP = "start-up"


@dataclass(frozen=True)
class Work:
    """What is trained, and how many times another trainer's speed we aim at.

    Attributes:
        cores: 0 where an accelerator computes.
        steps: of all runs together, of a trainer that compiles its environments.
        slow_steps: of one that steps them in Python.
    """

    env: str
    num_envs: int
    aims: dict[str, float]
    num_runs: int = 1
    cores: int = 1
    steps: int = 2_000_000
    slow_steps: int = 30_000

    @property
    def name(self) -> str:
        """In words."""
        runs = "1 run" if self.num_runs == 1 else f"{self.num_runs} runs"
        cores = {0: "1 accelerator", 1: "1 core"}.get(self.cores, f"{self.cores} cores")
        return f"{self.env}, {runs} of {self.num_envs} environments, {cores}"

    def iterations(self, steps: int) -> int:
        """That make so many steps."""
        return steps // (NUM_STEPS * self.num_envs * self.num_runs)


_BOTH = {"rejax": 0.0, "purejaxrl": 0.0}  # which compile their environments
WORKS = [
    Work("CartPole-v1", 64, _BOTH | {"rejax": 2.0}),
    Work("CartPole-v1", 4, _BOTH | {"rejax": 1.7, "sbx": 0.0, "sb3": 30.0}),
    Work("CartPole-v1", 4, {"rejax": 3.0}, num_runs=16, cores=2, steps=8_000_000),
    Work("Breakout-MinAtar", 64, _BOTH | {"rejax": 1.5}, steps=1_000_000),
    Work("Asterix-MinAtar", 64, _BOTH, steps=1_000_000),
]
ACCELERATED = [
    Work("CartPole-v1", 4, {"purejaxrl": 0.0}, num_runs=2048, cores=0, steps=100_000_000),
    Work("CartPole-v1", 2048, {"purejaxrl": 0.0}, cores=0, steps=100_000_000),
    Work("Breakout-MinAtar", 64, {"purejaxrl": 0.0}, num_runs=256, cores=0, steps=100_000_000),
]


def on_cores(command: list[str], cores: int) -> list[str]:
    """The command kept on the first cores that this process may use; 0: on all."""
    if not cores:
        return command
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    return ["taskset", "-c", ",".join(map(str, chosen)), *command]


def seconds_of(command: list[str], cores: int, environment: dict[str, str] | None = None) -> float:
    """From start to exit of a command, which must succeed."""
    started = time.perf_counter()
    subprocess.run(
        on_cores(command, cores),
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | (environment or {}),
    )
    return time.perf_counter() - started


def our_command(work: Work, iterations: int, run_dir: Path) -> list[str]:
    """Our training of so many iterations."""
    options = {
        "env": work.env,
        "num-envs": work.num_envs,
        "num-seeds": work.num_runs,
        "total-timesteps": work.num_envs * NUM_STEPS * iterations,
        "run-dir": run_dir,
    }
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "purejaxppo.run", *given, *SETTINGS]


def same_for_all(env: str) -> Config:
    """Our configuration of what all trainers train, but for the number of environments."""
    return cli.parse(["--env", env, *SETTINGS]).config


def our_speed(work: Work) -> float:
    """Steps per second of all runs, without compilation and the checkpoint at the end."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        command = our_command(work, work.iterations(work.steps), run_dir)
        seconds_of([*command, "--compile-effort", "full"], work.cores)
        return json.loads((run_dir / "summary.json").read_text())["steps_per_second"]


def peer_speed(work: Work, directory: Path, peer: str) -> float:
    """The same of another trainer."""
    task = {
        "env": work.env,
        "num_envs": work.num_envs,
        "num_steps": NUM_STEPS,
        "num_runs": work.num_runs,
        "iterations": work.iterations(work.steps if peer in _BOTH else work.slow_steps),
    }
    command = on_cores(peers.command(directory, peer, task), work.cores)
    # Or JAX without the accelerator's packages would train on the CPU.
    there = os.environ if work.cores else os.environ | {"JAX_PLATFORMS": "cuda"}
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=there).stdout
    return float(shown.split()[-1])  # after what libraries say of themselves


def speeds(work: Work, directory: Path, repeats: int) -> dict[str, list[float]]:
    """Of every trainer in turn, again and again; each is told as it comes."""
    found: dict[str, list[float]] = {who: [] for who in ("ours", *work.aims)}
    for _ in range(repeats):
        for who, values in found.items():
            values.append(our_speed(work) if who == "ours" else peer_speed(work, directory, who))
            print(f"{work.name}: {who} {values[-1]:,.0f} steps/s", flush=True)
    return found


def start_up(directory: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of CartPole trainings of one iteration on one core, from start to exit."""
    # As pip does with what it installs; where nothing may write it, Python would do so at every start.
    compileall.compile_dir(Path(machine.__file__).parent, quiet=1)
    work = WORKS[0]
    one = {"num_steps": NUM_STEPS, "num_runs": 1, "iterations": 1}
    theirs = peers.command(directory, "rejax", {"env": work.env, "num_envs": work.num_envs} | one)
    with tempfile.TemporaryDirectory() as name:
        run_dir, cache = Path(name) / "run", Path(name) / "cache"

        their_cache = {
            "JAX_COMPILATION_CACHE_DIR": f"{name}/theirs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        full = "--compile-effort", "full", "--no-compilation-cache"

        def ours(*options: str) -> float:
            shutil.rmtree(run_dir, ignore_errors=True)
            command = [*our_command(work, 1, run_dir), *options]
            return seconds_of(command, 1, {"JAX_COMPILATION_CACHE_DIR": str(cache)})

        runs: dict[str, Callable[[], float]] = {
            "first": ours,
            "again": ours,
            "again, no checkpoint": lambda: ours("--keep", "0"),
            "first, --compile-effort full": lambda: ours(*full),
            "rejax": lambda: seconds_of(theirs, 1),
            "rejax again, with a cache": lambda: seconds_of(theirs, 1, their_cache),
        }
        seconds_of(theirs, 1, their_cache)  # which fills it
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            shutil.rmtree(cache, ignore_errors=True)
            for name, run in runs.items():
                found[name].append(run())
    return found


def ratio(values: list[float], other: list[float]) -> float:
    """Median of the ratios, pair by pair."""
    return statistics.median(a / b for a, b in zip(values, other, strict=True))


def spread(values: list[float], form: str) -> str:
    """Median and range."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low} ... {high})"


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown, of one device after another."""
    return "\n".join(f"On {device}:\n\n{_of_device(here)}" for device, here in results.items())


def _of_device(results: dict[str, Any]) -> str:
    """A table of speeds, and one of starts where they were measured."""
    lines = [
        "| training | ours, steps/s | the other's | ratio | aim |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if name == START_UP:
            continue
        for peer, aim in result["aims"].items():
            ours, theirs = result["speeds"]["ours"], result["speeds"][peer]
            lines.append(
                f"| {name} | {spread(ours, '{:,.0f}')} | {peer} {spread(theirs, '{:,.0f}')} "
                f"| {ratio(ours, theirs):.3g} | {f'{aim:g}' if aim else ''} |"
            )
    if START_UP in results:
        found = results[START_UP]["seconds"]
        lines += [
            "",
            "| CartPole, one iteration, from start to exit, 1 core | seconds | of rejax's |",
            "|---|---|---|",
        ]
        for name, values in found.items():
            lines.append(
                f"| {name} | {spread(values, '{:.1f}')} | {ratio(values, found['rejax']):.2f} |"
            )
    return "\n".join(lines) + "\n"


def page(results: dict[str, dict[str, Any]]) -> str:
    """The table with what it needs to be understood."""
    rows = [(device, *row) for device, here in results.items() for row in here.items()]
    versions = {who: found for *_, row in rows for who, found in row["versions"].items()}
    shown = "; ".join(
        f"{who}: {', '.join(f'{n} {v}' for n, v in found.items() if n != 'purejaxppo')}"
        for who, found in versions.items()
    )
    measured = [
        f"- {name}: {device}, {row['date']}, purejaxppo {row['versions']['ours']['purejaxppo']}"
        for device, name, row in rows
    ]
    return "\n".join([
        "# Beside other trainers",
        "",
        "Made by `python -m benchmarks.compare`: two networks of 2 x 64 tanh units, rollouts of 128 "
        "steps, 4 epochs of 4 minibatches, float32; the trainers in turn, compilation left out. "
        "Medians and ranges; the ratio is the median over pairs. Ours writes its metrics meanwhile, "
        "and its checkpoint at the end, which is not counted: by default there is one a minute. A training as "
        "short as that of the start-up is compiled quickly, to a slower program, where `full` is not asked for; "
        "rejax keeps no compiled programs unless JAX is told to. PureJaxRL's sixteen runs are left out: on two cores "
        "their QR decompositions wait for each other, now and then for ever.",
        "",
        *measured,
        "",
        f"{shown}.",
        "",
        table(results),
    ])  # fmt: skip


def main() -> None:
    """Measures, and writes `results/compare.json` and `.md`; other devices' and what is not asked for are kept.

    The README gets the table too.
    """
    works = {work.name: work for work in [*WORKS, *ACCELERATED]}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where benchmarks.peers installed them")
    parser.add_argument("--only", action="append", choices=[*works, START_UP])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    device = shared.device()
    on_cpus = device.endswith("(cpu)")
    here = [*(work.name for work in (WORKS if on_cpus else ACCELERATED)), *[START_UP] * on_cpus]
    wanted = given.only or here
    if elsewhere := [name for name in wanted if name not in here]:
        parser.error(f"{elsewhere[0]}: not on {device}")
    needed = {
        peer for name in wanted for peer in (works[name].aims if name in works else ["rejax"])
    }
    missing = [p for p in sorted(needed) if not peers.python(given.directory, p).exists()]
    if missing:
        parser.error(f"no {', '.join(missing)} in {given.directory}: python -m benchmarks.peers")
    results = load("compare", {})
    where = f"{device}, {platform.machine()}"
    measured = results.get(where, {})
    about = {
        "date": datetime.date.today().isoformat(),
        "versions": {"ours": machine.versions()}
        | {
            peer: peers.versions(given.directory, peer)
            for peer in peers.PEERS
            if peers.python(given.directory, peer).exists()
        },
    }
    for name in wanted:
        if name == START_UP:
            measured[name] = {"seconds": start_up(given.directory, given.repeats)} | about
        else:
            found = speeds(works[name], given.directory, given.repeats)
            measured[name] = asdict(works[name]) | {"speeds": found} | about
        results[where] = {name: measured[name] for name in [*works, START_UP] if name in measured}
        save("compare", results, page(results))
    README.write_text(with_table(README.read_text(), "compare", table(results)))
    print(page(results))


if __name__ == "__main__":
    main()
