"""What more runs, environments, steps and devices cost.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --only runs --only environments --repeats 1

CartPole-v1 as in `benchmarks.compare`, on all cores. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare import NUM_STEPS, Work, our_command
from benchmarks.shared import RESULTS, load, save
from purejaxppo import machine

RUNS = (1, 2, 4, 16, 64, 256, 1024, 4096)
ENVIRONMENTS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
STEPS = (500_000, 1_000_000, 2_000_000, 4_000_000)
DEVICES = (1, 2, 4, 8)
RUNS_A_DEVICE = 8
ENVIRONMENTS_A_DEVICE = 256
SHORT, LONG = 500_000, 50_000_000


def train(
    work: Work, iterations: int, devices: int | None = None, shard: str = "runs"
) -> dict[str, float]:
    """Seconds of training without compilation, steps, and peak bytes of memory of one command."""
    environment = dict(os.environ)
    if devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        options = ["--metrics-rows", "10", "--compile-effort", "full", "--shard", shard]
        command = [*our_command(work, iterations, run_dir), *options]
        peak, _ = watched(command, environment)
        speed = json.loads((run_dir / "summary.json").read_text())["steps_per_second"]
    steps = work.num_runs * work.num_envs * NUM_STEPS * iterations
    return {"seconds": steps / speed, "steps": steps, "peak_bytes": peak}


def watched(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Peak bytes of memory of a command that must succeed, and what it printed."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, shown
    return 1024 * usage.ru_maxrss, shown


def over_runs() -> dict[int, dict[str, float]]:
    """One program that trains more and more runs of 4 environments."""
    works = {n: Work("CartPole-v1", 4, {}, num_runs=n) for n in RUNS}
    return {n: train(work, max(16, min(4000, 16_000 // n))) for n, work in works.items()}


def over_environments() -> dict[int, dict[str, float]]:
    """One run with more and more environments."""
    works = {n: Work("CartPole-v1", n, {}) for n in ENVIRONMENTS}
    return {n: train(work, max(4, min(4000, 16_000 // n))) for n, work in works.items()}


def over_steps() -> dict[int, dict[str, float]]:
    """One run of 64 environments that trains longer and longer."""
    work = Work("CartPole-v1", 64, {})
    return {n: train(work, work.iterations(n)) for n in STEPS}


def over_devices() -> dict[int, dict[str, float]]:
    """Weak scaling: as many runs on every virtual device."""
    works = {d: Work("CartPole-v1", 4, {}, num_runs=RUNS_A_DEVICE * d) for d in DEVICES}
    return {d: train(work, 1000, d) for d, work in works.items()}


def over_shards() -> dict[int, dict[str, float]]:
    """Weak scaling of one run, with as many of its environments on every virtual device."""
    works = {d: Work("CartPole-v1", ENVIRONMENTS_A_DEVICE * d, {}) for d in DEVICES}
    return {d: train(work, 200, d, "environments") for d, work in works.items()}


def memory_over_steps() -> dict[int, dict[str, float]]:
    """One run, a hundred times longer."""
    work = Work("CartPole-v1", 64, {})
    return {n: train(work, work.iterations(n)) for n in (SHORT, LONG)}


def memory_of_a_thousand() -> dict[str, Any]:
    """A thousand runs in 8 GiB: what was planned and what was taken, and what one block would take."""
    options = [
        "--env", "Breakout-MinAtar", "--cnn-layers", "flat", "--torso-layers", "128,128",
        "--num-envs", "64", "--num-steps", "128", "--num-minibatches", "4", "--update-epochs", "1", "--total-timesteps", "8192", "--eval-episodes", "0",
        "--num-seeds", "1000", "--memory-limit", "8GiB",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "purejaxppo.run", *options, "--run-dir"]
        peak, shown = watched([*command, f"{name}/run"], dict(os.environ))
        (planned,) = re.findall(r"([\d.]+) GiB of memory in all", shown)
        refused = subprocess.run(
            [*command, f"{name}/other", "--runs-per-block", "500"], capture_output=True, text=True
        )
    return {
        "planned_gib": float(planned),
        "peak_gib": peak / 2**30,
        "refused_with": refused.returncode,
        "refused": refused.stderr.strip(),
    }


PARTS: dict[str, tuple[Callable[[], dict[Any, Any]], str]] = {
    "runs": (
        over_runs,
        "As more runs of 4 environments are begun and trained by one program, for 16 iterations or more",
    ),
    "environments": (over_environments, "As one run has more environments"),
    "steps": (over_steps, "As one run of 64 environments trains longer, in steps"),
    "devices": (over_devices, f"{RUNS_A_DEVICE} runs on each of more virtual devices"),
    "shards": (
        over_shards,
        f"{ENVIRONMENTS_A_DEVICE} environments of one run on each of more virtual devices, which wait for "
        "each other at every minibatch",
    ),
    "memory": (memory_over_steps, "Memory of one run that trains longer, in steps"),
    "thousand": (memory_of_a_thousand, ""),
}


def medians(found: list[dict[str, dict[str, float]]]) -> dict[int, dict[str, float]]:
    """Over repetitions; sizes as numbers, since JSON has none as keys."""
    return {
        int(n): {key: statistics.median(f[n][key] for f in found) for key in found[0][n]}
        for n in found[0]
    }


def growth(points: dict[int, dict[str, float]]) -> dict[int, float]:
    """By how much a doubling multiplies the time of the same iterations, from one size to the next.

    That is 2 where cost is linear. Of iterations as many as were run, which differs.
    """
    found, sizes = {}, list(points)
    for before, n in itertools.pairwise(sizes):
        per_step = [points[size]["seconds"] / points[size]["steps"] for size in (before, n)]
        doublings = math.log2(n / before)
        found[n] = 2 * (per_step[1] / per_step[0]) ** (1 / doublings)
    return found


def rows(part: str, points: dict[int, dict[str, float]]) -> list[str]:
    """A table of one part."""
    lines = [
        f"| {part} | steps/s | a doubling multiplies time by | peak memory |",
        "|---|---|---|---|",
    ]
    grown = growth(points)
    for n, point in points.items():
        doubled = f"{grown[n]:.2f}" if n in grown else ""
        lines.append(
            f"| {n:,} | {point['steps'] / point['seconds']:,.0f} | {doubled} "
            f"| {point['peak_bytes'] / 2**30:.2f} GiB |"
        )
    return lines


def page(results: dict[str, Any]) -> str:
    """All parts as Markdown."""
    about = next(iter(results.values()))
    lines = [
        "# Scaling",
        "",
        "Made by `python -m benchmarks.scaling`: CartPole-v1, 128 steps, 4 epochs of 4 minibatches, two "
        f"networks of 2 x 64; {platform.machine()}, jax {about['versions']['jax']}. Compilation left out.",
        "",
        "![time against runs, environments and steps](scaling.png)",
        "",
        "A doubling multiplies the time by 2 where cost is linear, by less where there was room.",
    ]
    for part, result in results.items():
        if part == "thousand":
            (found,) = result["found"]
            lines += [
                "",
                "1,000 runs of Breakout-MinAtar (64 environments x 128 steps) with `--memory-limit "
                f"8GiB`: planned {found['planned_gib']:.2f} GiB, peak {found['peak_gib']:.2f} GiB. In "
                f"one block on each device, status {found['refused_with']}:",
                "",
                f"    {found['refused']}",
            ]
            continue
        times = len(result["found"])
        how = "measured once" if times == 1 else f"medians of {times} measurements"
        where = f"{result['cores']} cores of {result['device']}"
        lines += ["", f"{PARTS[part][1]} ({how}, {result['date']}, {where}):", ""]
        lines += rows(part, medians(result["found"]))
    return "\n".join(lines) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """Time of a million steps against the size, of each part that has sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    drawn = [part for part in results if part not in ("memory", "thousand")]
    figure, axes = plt.subplots(1, len(drawn), figsize=(3.2 * len(drawn), 2.8), squeeze=False)
    for axis, part in zip(axes[0], drawn, strict=True):
        points = medians(results[part]["found"])
        each = [1e6 * point["seconds"] / point["steps"] for point in points.values()]
        axis.plot(list(points), each, marker="o")
        axis.set(xscale="log", xlabel=part, ylabel="seconds a million steps")
        axis.set_ylim(0, 1.1 * max(each))
        axis.minorticks_off()
        shown = EngFormatter(places=0, sep="")
        axis.set_xticks(list(points), [shown(n) for n in points], rotation=45)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measures, and writes `results/scaling.json`, `.md` and `.png`; what is not asked for is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results = load("scaling", {})
    about = {
        "date": datetime.date.today().isoformat(),
        "device": machine.device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": machine.versions(),
    }
    for part in given.only or PARTS:
        once = part in ("memory", "thousand")
        found = [PARTS[part][0]() for _ in range(1 if once else given.repeats)]
        results[part] = json.loads(json.dumps({"found": found} | about))
        results = {part: results[part] for part in PARTS if part in results}
        save("scaling", results, page(results))
    draw(results, RESULTS / "scaling.png")
    print(page(results))


if __name__ == "__main__":
    main()
