"""What a training is compiled to, in counts that no noise touches: a guard against backsliding.

    python -m benchmarks.budget            # compares with the committed counts
    python -m benchmarks.budget --write    # makes them the new ones

A test fails where a count has grown by more than a tenth. Counts belong to a version of JAX.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from purejaxppo.effort import each_equation
from purejaxppo.envs import load_settings
from purejaxppo.plan import Plan
from purejaxppo.train import Trainer, make_setup, stack_hypers

BASELINE = Path(__file__).parent / "results" / "budget.json"
ALLOWED = 1.1
ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1")


def count(env: str) -> dict[str, int]:
    """Of the program of a chunk: traced equations and random sites, and what XLA made of them.

    `kernels` are fusions, products, sorts and library calls. `arrays` is of the program for a GPU: what its
    scans put out, each of which is written by a kernel.
    """
    traced = _traced(env)
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        on_gpu = _traced(env).jaxpr.jaxpr
    scans = (e for e, _ in each_equation(on_gpu) if e.primitive.name == "scan")
    equations = Counter(e.primitive.name for e, _ in each_equation(traced.jaxpr.jaxpr))
    text = traced.lower().compile().as_text()
    # name = shape opcode(...), where the shape may be a tuple.
    opcodes = re.findall(r"^\s+(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", text, re.MULTILINE)
    instructions = Counter(opcodes)
    kernels = ("fusion", "dot", "sort", "custom-call", "scatter", "call")
    return {
        "equations": equations.total(),
        "random_sites": equations["random_bits"] + equations["threefry2x32"],
        "kernels": sum(instructions[name] for name in kernels),
        "sorts": instructions["sort"],
        "loops": instructions["while"],
        "arrays": sum(len(scan.outvars) - scan.params.get("num_carry", 0) for scan in scans),
    }


def _traced(env: str) -> Any:
    """The program of a small training's chunk."""
    settings = load_settings(env)
    config = dataclasses.replace(settings.config, num_envs=8, num_steps=16, torso_layers=(8, 8))
    trainer = Trainer(make_setup(config), Plan(num_runs=1, num_devices=1, block=1))
    hypers = trainer.shard(stack_hypers([settings.hyper]))
    start = (trainer.shard(np.zeros(1, np.uint32)), hypers, ())
    states = trainer.sharded_like(jax.eval_shape(trainer.init, *start))
    return trainer.chunk.trace(states, hypers, (np.int32(1), np.float32(1)))


def grown(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """The counts that are more than a tenth above the committed ones."""
    return [
        f"{name} {before[name]} -> {value}"
        for name, value in now.items()
        if value > ALLOWED * before[name]
    ]


def baseline(env: str) -> dict[str, int] | None:
    """The committed counts of an environment with this version of JAX, if there are any."""
    return json.loads(BASELINE.read_text()).get(jax.__version__, {}).get(env)


def main() -> None:
    """Compares, or writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    counts = {env: count(env) for env in ENVIRONMENTS}
    for env, now in counts.items():
        print(env, now, "before:", baseline(env) if BASELINE.exists() else None)
    if write:
        known = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
        BASELINE.write_text(json.dumps(known | {jax.__version__: counts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
