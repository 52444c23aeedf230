"""Start-up and throughput beside rejax, alternating in one run on one core.

    python -m benchmarks.speed --peer-python /path/to/venv/bin/python

The peer's interpreter needs `rejax` and the gymnax it works with (0.0.9). CartPole-v1, two networks
of 2 x 64 tanh units, 128 steps, 4 epochs of 4 minibatches. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import importlib.metadata
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
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PEER = str(Path(__file__).with_name("peer_rejax.py"))
SETTINGS = [
    "--env", "CartPole-v1", "--num-steps", "128", "--update-epochs", "4", "--num-minibatches", "4",
    "--torso-layers", "64,64", "--no-normalize-rewards", "--eval-episodes", "0",
]  # fmt: skip


def ours(directory: Path, num_envs: int, iterations: int, *options: str) -> dict[str, float]:
    """Seconds from start to exit of our command, and the steps per second that it reports."""
    run_dir = directory / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "purejaxppo.run", *SETTINGS, "--run-dir", str(run_dir)]
    command += ["--num-envs", str(num_envs), "--total-timesteps", str(num_envs * 128 * iterations)]
    seconds = timed([*command, *options], {"JAX_COMPILATION_CACHE_DIR": str(directory / "cache")})
    summary = json.loads((run_dir / "summary.json").read_text())
    return {"seconds": seconds, "steps_per_second": summary["steps_per_second"]}


def timed(command: list[str], environment: dict[str, str] | None = None) -> float:
    """Seconds from start to exit of a command on one core, which must succeed."""
    started = time.perf_counter()
    subprocess.run(
        one_core(command), check=True, capture_output=True, env=os.environ | (environment or {})
    )
    return time.perf_counter() - started


def one_core(command: list[str]) -> list[str]:
    """The command kept on the first core that this process may use."""
    return ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]


def startup(directory: Path, peer: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of trainings of one iteration: ours without and with a filled cache, rejax's."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "no checkpoint": [], "rejax": []}
    runs: dict[str, Callable[[], float]] = {
        "cold": lambda: ours(directory, 64, 1)["seconds"],
        "warm": lambda: ours(directory, 64, 1)["seconds"],
        "no checkpoint": lambda: ours(directory, 64, 1, "--keep", "0")["seconds"],
        "rejax": lambda: timed([peer, PEER, "64", "1", "1"]),
    }
    for _ in range(repeats):
        shutil.rmtree(directory / "cache", ignore_errors=True)
        for name, run in runs.items():
            seconds[name].append(run())
    return seconds


def throughput(directory: Path, peer: str, num_envs: int, repeats: int) -> dict[str, list[float]]:
    """Steps per second of whole trainings without compilation, ours and rejax's in turn."""
    iterations = 500_000 // (128 * num_envs)
    speeds: dict[str, list[float]] = {"ours": [], "rejax": []}
    for _ in range(repeats):
        speeds["ours"].append(ours(directory, num_envs, iterations)["steps_per_second"])
        command = [peer, PEER, str(num_envs), str(iterations), "2"]
        done = subprocess.run(one_core(command), check=True, capture_output=True, text=True)
        speeds["rejax"].append(float(done.stdout))
    return speeds


def row(name: str, values: list[float], other: list[float], form: str) -> str:
    """A line of the table: median, range, and the median of the ratios pair by pair."""
    ratio = statistics.median(a / b for a, b in zip(values, other, strict=True))
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"| {name} | {middle} | {low} ... {high} | {ratio:.2f} |"


def main() -> None:
    """Measures and writes `results/speed.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="interpreter that has rejax")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, peer = Path(name), arguments.peer_python
        seconds = startup(directory, peer, arguments.repeats)
        speeds = {n: throughput(directory, peer, n, arguments.repeats) for n in (4, 64)}
    show = "import importlib.metadata as m; print(m.version('rejax'), m.version('jax'))"
    version = subprocess.run([peer, "-c", show], check=True, capture_output=True, text=True).stdout
    lines = [
        "# Speed beside rejax",
        "",
        "Made by `python -m benchmarks.speed`: CartPole-v1, two networks of 2 x 64 tanh units, 128 "
        f"steps, 4 epochs of 4 minibatches, one core ({platform.machine()}), {arguments.repeats} "
        "alternating runs. The ratio is the median over pairs, to rejax.",
        "",
        f"jax {importlib.metadata.version('jax')}; rejax and its jax: {version.strip()}.",
        "",
        "One iteration with 64 environments, no evaluation, process start to exit:",
        "",
        "| | median | range | ratio to rejax |",
        "|---|---|---|---|",
        row("empty compilation cache", seconds["cold"], seconds["rejax"], "{:.1f} s"),
        row("the same command again", seconds["warm"], seconds["rejax"], "{:.1f} s"),
        row("... without a checkpoint", seconds["no checkpoint"], seconds["rejax"], "{:.1f} s"),
        row("rejax", seconds["rejax"], seconds["rejax"], "{:.1f} s"),
        "",
        "Steps per second, compilation left out:",
        "",
        "| | median | range | ratio to rejax |",
        "|---|---|---|---|",
    ]
    for num_envs, measured in speeds.items():
        for who, values in measured.items():
            lines.append(row(f"{who}, {num_envs} envs", values, measured["rejax"], "{:,.0f}"))
    text = "\n".join(lines) + "\n"
    (RESULTS / "speed.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
