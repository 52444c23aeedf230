"""Many runs at once: beside rejax vmapped over the same seeds, from 1 to 256 runs, and over devices.

    python -m benchmarks.scaling --peer-python /path/to/venv/bin/python

The peer's interpreter needs `rejax` and the gymnax it works with (0.0.9). CartPole-v1, 4
environments, as in `benchmarks.speed`, on all cores. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.speed import PEER, RESULTS, SETTINGS, row

NUM_ENVS, STEPS = 4, 4 * 128
RUNS = (1, 2, 4, 16, 64, 256)
DEVICES = (1, 2, 4, 8)
RUNS_A_DEVICE = 8


def ours(num_runs: int, iterations: int, devices: int | None = None) -> float:
    """Steps per second of all runs together, compilation left out."""
    environment = dict(os.environ)
    if devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        command = [sys.executable, "-m", "purejaxppo.run", *SETTINGS, "--run-dir", str(run_dir)]
        command += ["--num-envs", str(NUM_ENVS), "--total-timesteps", str(STEPS * iterations)]
        command += ["--num-seeds", str(num_runs), "--metrics-rows", "10"]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return json.loads((run_dir / "summary.json").read_text())["steps_per_second"]


def rejax(peer: str, num_runs: int, iterations: int) -> float:
    """The same by rejax."""
    command = [peer, PEER, str(NUM_ENVS), str(iterations), "2", str(num_runs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def beside_rejax(peer: str, repeats: int) -> list[str]:
    """16 runs, in turn."""
    pairs = [(ours(16, 500), rejax(peer, 16, 500)) for _ in range(repeats)]
    mine, theirs = (list(speeds) for speeds in zip(*pairs, strict=True))
    return [
        "| 16 runs | steps/s, median | range | ratio to rejax |",
        "|---|---|---|---|",
        row("ours", mine, theirs, "{:,.0f}"),
        row("rejax, vmapped over the seeds", theirs, theirs, "{:,.0f}"),
    ]


def over_runs(repeats: int) -> list[str]:
    """Time that a run costs, as more of them are trained together."""
    speeds: dict[int, list[float]] = {n: [] for n in RUNS}
    for _ in range(repeats):
        for n in RUNS:
            speeds[n].append(ours(n, max(100, 8000 // n)))
    medians = {n: statistics.median(values) for n, values in speeds.items()}
    lines = ["| runs | steps/s | time a run, relative to 16 |", "|---|---|---|"]
    for n, speed in medians.items():
        lines.append(f"| {n} | {speed:,.0f} | {medians[16] / speed:.2f} |")
    return lines


def over_devices(repeats: int) -> list[str]:
    """Weak scaling: as many runs on every virtual device."""
    speeds = {
        d: statistics.median(ours(RUNS_A_DEVICE * d, 500, d) for _ in range(repeats))
        for d in DEVICES
    }
    lines = ["| devices | runs | steps/s | relative to 1 |", "|---|---|---|---|"]
    for devices, speed in speeds.items():
        lines.append(
            f"| {devices} | {RUNS_A_DEVICE * devices} | {speed:,.0f} | {speed / speeds[1]:.2f} |"
        )
    return lines


def memory() -> list[str]:
    """A thousand runs in 8 GiB: what was planned and what was taken, and what one block would take."""
    options = [
        "--env", "Breakout-MinAtar", "--num-envs", "64", "--num-steps", "128", "--num-minibatches",
        "4", "--update-epochs", "1", "--total-timesteps", "8192", "--eval-episodes", "0",
        "--num-seeds", "1000", "--memory-limit", "8GiB",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "purejaxppo.run", *options, "--run-dir", f"{name}/run"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        shown = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0, shown
        (planned,) = re.findall(r"([\d.]+) GiB of memory in all", shown)
        refused = subprocess.run(
            [*command[:-1], f"{name}/other", "--runs-per-block", "500"],
            capture_output=True,
            text=True,
        )
    return [
        f"1,000 runs of Breakout-MinAtar (64 environments x 128 steps) with `--memory-limit 8GiB`: "
        f"planned {planned} GiB, peak {usage.ru_maxrss / 2**20:.2f} GiB. In one block on each device, "
        f"status {refused.returncode}:",
        "",
        f"    {refused.stderr.strip()}",
    ]


def main() -> None:
    """Measures and writes `results/scaling.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="interpreter that has rejax")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# Many runs at once",
        "",
        "Made by `python -m benchmarks.scaling`: CartPole-v1, 4 environments x 128 steps, 4 epochs of 4 "
        f"minibatches, two networks of 2 x 64, {cores} cores ({platform.machine()}), medians of "
        f"{arguments.repeats}, compilation left out.",
        "",
        *beside_rejax(arguments.peer_python, arguments.repeats),
        "",
        "As more runs are trained by one program:",
        "",
        *over_runs(arguments.repeats),
        "",
        f"As many runs on each of more virtual devices, on {cores} cores:",
        "",
        *over_devices(arguments.repeats),
        "",
        *memory(),
    ]
    text = "\n".join(lines) + "\n"
    (RESULTS / "scaling.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
