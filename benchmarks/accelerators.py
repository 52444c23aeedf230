"""What accelerators would run, without one: programs compiled for an H100 and a TPU v5e by their own compilers.

    pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12 libtpu==0.0.42.1
    python -m benchmarks.accelerators

That is for jax 0.10.2, in an environment of its own. Nothing runs, so there are no speeds. An accelerator
takes a few microseconds to launch a kernel, however small it is: what counts where most are small. With
thousands of runs they are not, and an H100 waits for its memory (`results/gpus.md`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import compare, peers
from benchmarks.shared import load, save
from purejaxppo import envs
from purejaxppo.envs import load_settings
from purejaxppo.executables import num_bytes
from purejaxppo.plan import make_plan
from purejaxppo.train import Trainer, make_setup, stack_hypers

# What XLA's compiler for GPUs asks of the device, of an H100 with 80 GB.
_H100 = """
    gpu_device_info {
      cuda_compute_capability { major: 9 }
      threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
      shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
      registers_per_core_limit: 65536  registers_per_block_limit: 65536
      block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
      core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
      l2_cache_size: 52428800  memory_bandwidth: 3352320000000  device_memory_size: 84942979072
    }
    platform_name: "CUDA"
    dnn_version_info { major: 9 minor: 8 }
    device_description_str: "NVIDIA H100 80GB HBM3"
"""
_BACKENDS = {"cuda": "gpu", "tpu": "tpu"}
# Instructions that launch nothing.
_FREE = {
    "parameter", "tuple", "get-tuple-element", "constant", "bitcast", "after-all", "partition-id",
    "while", "call", "conditional", "async-start", "async-done", "async-update", "all-reduce-done", "copy-done",
    "all-gather-done", "collective-permute-done",
}  # fmt: skip
# Instructions that others are inside of, and where their names are.
_CALLING = {
    "while": "body",
    "call": "to_apply",
    "conditional": "(?:branch_computations|true_computation|false_computation)",
    "async-start": "calls",
}


@dataclass(frozen=True)
class Work:
    """A training to compile: with the shipped settings, but for what is given."""

    env: str
    runs: int = 1
    num_envs: int | None = None
    devices: int = 1
    shard_environments: bool = False
    as_rejax: bool = False
    dense: Literal["auto", "xla"] = "auto"

    def __str__(self) -> str:
        parts = [
            f"{self.runs} runs" if self.runs > 1 else "",
            f"{self.devices} devices" if self.devices > 1 else "",
        ]
        parts += [f"{self.num_envs} environments"] * (self.num_envs is not None)
        parts += ["environments divided"] * self.shard_environments
        parts += ["as rejax"] * self.as_rejax + ["--dense xla"] * (self.dense == "xla")
        return ", ".join([self.env, *filter(None, parts)])


WORKS = (
    Work("CartPole-v1", runs=2048),
    Work("CartPole-v1", runs=8, devices=4),
    Work("CartPole-v1", num_envs=1024, devices=4, shard_environments=True),
    Work("Pendulum-v1", runs=256),
    Work("Breakout-MinAtar", runs=256),
    Work("MemoryChain-bsuite", runs=64),
    Work("brax/ant", num_envs=4096),
    Work("CartPole-v1", runs=2048, num_envs=4, as_rejax=True),
    Work("CartPole-v1", runs=2048, num_envs=4, as_rejax=True, dense="xla"),
    Work("Breakout-MinAtar", runs=256, num_envs=64, as_rejax=True),
)


@dataclass(frozen=True)
class Loop:
    """A loop of a compiled program: what it launches each time, and how often it goes round.

    Attributes:
        times: None where only the device knows it.
        loops: inside it.
    """

    times: int | None
    kernels: int
    loops: tuple[Loop, ...]

    @property
    def launched(self) -> int:
        """Kernels each time, with those of the loops inside; a loop of unknown length counts once."""
        return self.kernels + sum((loop.times or 1) * loop.launched for loop in self.loops)


def read_loops(text: str) -> Loop:
    """The loops of a program as XLA prints it once compiled, the whole of it as the outermost."""
    computations: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if begins := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line):
            entry, current = begins.groups()
            computations[current if not entry else "ENTRY"] = instructions = []
        elif found := re.match(r"\s+(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", line):
            instructions.append((found[1], line))

    def read(name: str, times: int | None) -> Loop:
        body = computations[name]
        inside = [
            read(called, _times(line) if op == "while" else 1)
            for op, line in body
            if op in _CALLING
            for names in re.findall(_CALLING[op] + r"=(\{.*?\}|[^\s,]+)", line)
            for called in re.findall(r"[\w.-]+", names)
        ]
        return Loop(times, sum(op not in _FREE for op, _ in body), tuple(inside))

    return read("ENTRY", 1)


def _times(line: str) -> int | None:
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    return int(known[1]) if known else None


def devices(platform: str) -> list[Any]:
    """Four devices to compile for, none of which is there."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or it looks for a TPU in the network
    if platform == "tpu":
        return list(topologies.get_topology_desc("v5e:2x2", "tpu").devices)
    return list(
        topologies.get_topology_desc(platform="cuda", topology="1x1x4", target_config=_H100).devices
    )


def compiled(work: Work, platform: str, there: list[Any]) -> dict[str, Any]:
    """The programs of a training: init, chunk and evaluate."""
    settings = load_settings(work.env)
    config = settings.config
    if work.as_rejax:
        config = compare.same_for_all(work.env)
    config = dataclasses.replace(config, dense=work.dense)
    if work.num_envs:
        config = dataclasses.replace(config, num_envs=work.num_envs)
    on_platform = mock.patch.object(jax, "default_backend", return_value=_BACKENDS[platform])
    with on_platform:  # but on a device that is there: some compute what they need
        env = envs.make(config.env, config.env_options)
    shards = work.devices if work.shard_environments else 1
    share = dataclasses.replace(config, num_envs=config.num_envs // shards)
    hypers: Any = stack_hypers([settings.hyper] * work.runs)
    with on_platform, mock.patch.object(jax, "devices", return_value=there[: work.devices]):
        setup = make_setup(share, env)
        plan = make_plan(setup, work.runs, shard_environments=work.shard_environments)
        evaluation = envs.vectorize(config, env, settings.run.eval_episodes // shards)
        trainer = Trainer(setup, plan, evaluation, settings.run.eval_sampled)
        by_run = NamedSharding(trainer.mesh, PartitionSpec("runs"))
        seeds, hypers = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((plan.padded,), x.dtype, sharding=by_run),
            (np.zeros(1, np.uint32), hypers),
        )
        start = (seeds, hypers, ())
        states = trainer.sharded_like(jax.eval_shape(trainer.init, *start))
        programs = {
            "init": start,
            "chunk": (states, hypers, (np.int32(1), np.float32(1))),
            "evaluate": (states, hypers, ()),
        }
        return {
            name: getattr(trainer, name)
            .trace(*arguments)
            .lower(lowering_platforms=(platform,))
            .compile()
            for name, arguments in programs.items()
        }


def measure(work: Work, platform: str, there: list[Any]) -> dict[str, Any]:
    """What the programs of a training say."""
    programs = compiled(work, platform, there)
    result = {
        "work": str(work),
        "platform": platform,
        "bytes": max(map(num_bytes, programs.values())),
    }
    if platform == "tpu":  # whose programs do not say how often loops go round
        return result
    (iteration,) = read_loops(programs["chunk"].as_text()).loops
    *others, epoch = iteration.loops
    rollout = max(others, key=lambda loop: (loop.times or 1) * loop.launched)
    *_, minibatch = epoch.loops
    return result | {
        "step": rollout.launched,
        "minibatch": minibatch.launched,
        "iteration": iteration.launched,
    }


def measure_rejax(work: Work, directory: Path) -> dict[str, Any]:
    """What rejax's program of the same training says, for an H100."""
    size = {"num_envs": work.num_envs, "num_steps": compare.NUM_STEPS, "num_runs": work.runs}
    task = {"env": work.env, "iterations": 100, "target": _H100} | size
    command = peers.command(directory, "rejax", task)
    on_cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=on_cpu)
    memory, _, program = done.stdout.partition("\n")
    (iteration,) = read_loops(program).loops
    return {
        "work": f"{work}: rejax",
        "platform": "cuda",
        "bytes": int(memory),
        "iteration": iteration.launched,
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    names = {"cuda": "H100", "tpu": "TPU v5e"}
    lines = [
        "# Programs compiled for accelerators",
        "",
        "Made by `python -m benchmarks.accelerators --peers DIRECTORY`, on a machine without any: with XLA's compilers for an H100 "
        f"(sm_90) and a TPU v5e, jax {jax.__version__}. None of it has run. Settings are the shipped ones but for what "
        "is said. Kernels are what is launched, before any are grouped into CUDA graphs: in a step of all environments of all runs, for a minibatch of each "
        "of them, and in a whole iteration. As rejax: rollouts of 128 steps, 4 epochs of 4 minibatches, two networks of "
        "2 x 64 tanh units; beside rejax's own program. Memory is a device's, of the largest program's arguments, results and all between.",
        "",
        "| training | for | kernels a step | a minibatch | an iteration | memory |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        counts = [
            f"{r[name]:,}" if name in r else "" for name in ("step", "minibatch", "iteration")
        ]
        lines.append(
            f"| {r['work']} | {names[r['platform']]} | {' | '.join(counts)} | {r['bytes'] / 2**20:,.1f} MiB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compiles for the devices asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", action="append", choices=_BACKENDS, dest="platforms")
    help_ = "also compiles rejax's, of `python -m benchmarks.peers DIRECTORY`, which needs the same packages"
    parser.add_argument("--peers", type=Path, metavar="DIRECTORY", help=help_)
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    known = {(r["work"], r["platform"]): r for r in load("accelerators", [])}
    for platform in given.platforms or _BACKENDS:
        there = devices(platform)
        for work in WORKS:
            measured = [measure(work, platform, there)]
            if given.peers and work.as_rejax and work.dense == "auto" and platform == "cuda":
                measured.append(measure_rejax(work, given.peers))
            known |= {(r["work"], r["platform"]): r for r in measured}
            print(*measured, sep="\n", flush=True)
    names = [name for work in WORKS for name in (str(work), f"{work}: rejax")]
    rows = [(name, platform) for platform in _BACKENDS for name in names]
    results = [known[row] for row in rows if row in known]
    save("accelerators", results, table(results))


if __name__ == "__main__":
    main()
