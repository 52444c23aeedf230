"""Where the time of a training goes: compilation, first and later iterations, and the parts of one.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --env brax/ant --num-envs 2048 --repeats 5
    taskset -c 0 python -m benchmarks.throughput --env CartPole-v1 --num-envs 64   # one core
    python -m benchmarks.throughput --num-seeds 2048 --num-envs 4 --as-rejax   # a GPU
    python -m benchmarks.throughput --kernels   # also where XLA's code spends it

On one device, with the environment's shipped settings but for what is given. The parts of one run are compiled by
themselves, so they need not add up to an iteration, in which XLA may overlap and fuse them; those of several are not taken
apart. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compare import same_for_all
from benchmarks.shared import load, save
from purejaxppo import machine, ppo, rollouts, updates
from purejaxppo.activations import tanh
from purejaxppo.convolutions import conv_shapes
from purejaxppo.distributions import num_outputs
from purejaxppo.effort import compiler_options
from purejaxppo.envs import load_settings
from purejaxppo.plan import MAX_CHUNK, Plan
from purejaxppo.train import Trainer, as_arrays, make_setup, stack_hypers


def measure(
    env: str,
    num_envs: int | None,
    num_steps: int | None,
    repeats: int,
    num_seeds: int = 1,
    as_rejax: bool = False,
    dense: str = "auto",
    kernels: bool = False,
) -> dict[str, Any]:
    """All figures of one environment, times in seconds; `kernels` adds those of `kernel_times`."""
    settings = load_settings(env)
    given: dict[str, Any] = {"num_envs": num_envs, "num_steps": num_steps, "dense": dense}
    config = same_for_all(env) if as_rejax else settings.config
    config = dataclasses.replace(config, **{k: v for k, v in given.items() if v})
    setup, hyper = make_setup(config), settings.hyper
    found: dict[str, Any] = {
        "env": ", ".join(
            [env, *["as rejax"] * as_rejax, *[f"--dense {dense}"] * (dense != "auto")]
        ),
        "num_seeds": num_seeds,
        "num_envs": config.num_envs,
        "num_steps": config.num_steps,
        "device": machine.device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": machine.versions(),
    }
    found |= whole(setup, hyper, repeats, num_seeds, kernels)
    found["steps_per_second"] = num_seeds * config.batch_size / np.median(found["iteration"])
    if num_seeds == 1:
        found |= parts(setup, hyper, repeats)
        found |= roofline(setup)
        found["fraction"] = found["least_update"] / np.median(found["update"])
    found["peak_bytes"] = peak_bytes()
    return found


def peak_bytes() -> int:
    """Most memory that was taken: of the device where it has its own, else of the process."""
    of_device = jax.devices()[0].memory_stats()
    if of_device:
        return of_device["peak_bytes_in_use"]
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def whole(
    setup: rollouts.Setup, hyper: Any, repeats: int, num_seeds: int = 1, kernels: bool = False
) -> dict[str, Any]:
    """Compilation, the first iteration, and the time of one among many."""
    trainer = Trainer(setup, Plan(num_runs=num_seeds, num_devices=1, block=num_seeds))
    hypers = trainer.shard(stack_hypers([hyper] * num_seeds))
    seeds = trainer.shard(np.arange(num_seeds, dtype=np.uint32))
    states = trainer.init(seeds, hypers, ())
    shared = np.int32(1), np.float32(setup.config.iterations)
    started = time.perf_counter()
    lowered = trainer.chunk.lower(states, hypers, shared)
    traced = time.perf_counter()
    chunk = lowered.compile()
    compiled = time.perf_counter()
    states, _ = jax.block_until_ready(chunk(states, hypers, shared))
    first = time.perf_counter() - compiled
    count, seconds = 1, first
    while seconds < 0.5 and count < MAX_CHUNK:  # so that launching costs nothing
        count = min(2 * count, MAX_CHUNK)
        states, seconds = timed_chunk(chunk, states, hypers, count, shared[1])
    times = []
    for _ in range(repeats):
        states, seconds = timed_chunk(chunk, states, hypers, count, shared[1])
        times.append(seconds / count)
    memory = chunk.memory_analysis()
    one = functools.partial(timed_chunk, chunk, states, hypers, 1, shared[1])
    return {
        "trace": traced - started,
        "compile": compiled - traced,
        "first_iteration": first,
        "iteration": times,
        "program_bytes": memory.temp_size_in_bytes + memory.argument_size_in_bytes,
    } | ({"kernels": kernel_times(one)} if kernels else {})


# What a CPU's profile has of whatever is around fusions.
_AROUND = ("end: ", "Thread", "Thunk", "while", "call", "conditional")


def kernel_times(run: Callable[[], Any]) -> dict[str, list[float]]:
    """How often each kernel runs, on a GPU, or each fusion, on a CPU, and for how many seconds; the longest first."""
    lines, around = ("Stream", ()) if jax.default_backend() == "gpu" else ("tf_", _AROUND)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    found: dict[str, list[float]] = {}
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events if lines in line.name else ():
                if event.name.startswith(around):
                    continue
                count, seconds = found.get(event.name, (0, 0.0))
                found[event.name] = [count + 1, seconds + event.duration_ns / 1e9]
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def timed_chunk(
    chunk: Callable[..., Any], states: Any, hypers: Any, count: int, iterations: np.float32
) -> tuple[Any, float]:
    """The states after `count` iterations, and the seconds that they took."""
    started = time.perf_counter()
    states, _ = jax.block_until_ready(chunk(states, hypers, (np.int32(count), iterations)))
    return states, time.perf_counter() - started


def parts(setup: rollouts.Setup, hyper: Any, repeats: int) -> dict[str, list[float]]:
    """Rollout, advantages and update, each as a program of its own, with its random numbers drawn."""
    hyper = as_arrays(hyper)
    options = compiler_options(setup)

    def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        return jax.jit(function).lower(*arguments).compile(options)

    state = compiled(lambda key: ppo.init(setup, key, hyper), jax.random.key(0))(jax.random.key(0))
    draw = compiled(lambda key: rollouts.draw(setup, key), jax.random.key(1))
    draws = draw(jax.random.key(1))
    rollout = compiled(lambda state, draws: rollouts.rollout(setup, state, draws), state, draws)
    after, data = rollout(state, draws)
    advantages = compiled(
        lambda state, data: rollouts.advantages(setup, state, data, hyper), after, data
    )
    advantage = advantages(after, data)
    update = compiled(
        lambda state, data, advantage, order: updates.update(
            setup, state, data, advantage, hyper, order
        ),
        after, data, advantage, draws.order,
    )  # fmt: skip
    return {
        "draw": timed(repeats, draw, jax.random.key(1)),
        "rollout": timed(repeats, rollout, state, draws),
        "advantages": timed(repeats, advantages, after, data),
        "update": timed(repeats, update, after, data, advantage, draws.order),
    }


def timed(repeats: int, function: Callable[..., Any], *arguments: Any) -> list[float]:
    """Seconds of calls, each of as many as make 0.1 s."""
    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    count = max(1, int(0.1 / (time.perf_counter() - started)))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(count):
            result = function(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - started) / count)
    return times


def roofline(setup: rollouts.Setup) -> dict[str, float]:
    """The least time that the update of an iteration can take, at rates measured here and now.

    Matrix products at the rate of a large one, activations at that of tanh, and bytes at that of a
    copy: the samples once an epoch, parameters and Adam's moments once a minibatch, there and back.
    Convolutions are counted as products of patches; Winograd's filters may need less.
    """
    config, env, agent = setup
    shapes = jax.eval_shape(agent.init, jax.random.key(0), load_settings(config.env).hyper)
    samples, shape = config.batch_size * config.update_epochs, env.observation_space.shape
    torsos = 1 if agent.network.shared_torso else 2
    layers = conv_shapes(agent.network.cnn_layers, shape)
    multiplied = [torsos * conv.positions * conv.patch * conv.features for conv in layers]
    kernels = [x.shape for x in jax.tree.leaves(shapes) if len(x.shape) == 2]
    # Forward, and both gradients; nobody needs the one of the observations.
    first = (
        multiplied[0] if layers else sum(k[0] * k[1] for k in kernels if k[0] == math.prod(shape))
    )
    multiplied += [math.prod(kernel) for kernel in kernels]
    products = 2 * samples * (3 * sum(multiplied) - first)
    units = torsos * sum(agent.network.torso_layers)
    units += torsos * sum(conv.positions * conv.features for conv in layers)
    units += sum(config.policy_layers) + sum(config.value_layers)
    params = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    per_sample = math.prod(env.observation_space.shape) + 2 * num_outputs(env.action_space) + 6
    moved = 4 * samples * per_sample
    moved += 2 * 4 * 3 * params * config.update_epochs * config.num_minibatches
    rates = {
        "matmul_rate": 2 * 1024**3 / once(lambda x: x @ x, jnp.ones((1024, 1024))),
        "tanh_rate": 2**20 / once(tanh, jnp.linspace(-2, 2, 2**20)),
        "copy_rate": 2 * 2**26 / once(lambda x: x + 1, jnp.ones(2**24)),
    }
    times = {
        "least_products": products / rates["matmul_rate"],
        "least_activations": units * samples / rates["tanh_rate"],
        "least_bytes": moved / rates["copy_rate"],
    }
    return rates | times | {"least_update": sum(times.values())}


def once(function: Callable[..., Any], argument: jax.Array) -> float:
    """Seconds of a call, the median of nine."""
    compiled = jax.jit(function).lower(argument).compile()
    return float(np.median(timed(9, compiled, argument)))


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    versions = {result["versions"]["jax"] for result in results}
    lines = [
        "# Throughput",
        "",
        f"Made by `python -m benchmarks.throughput`: {platform.machine()}, jax "
        f"{', '.join(sorted(versions))}; one run or several at once with the shipped settings but for N "
        "environments and T steps, or as rejax, with the networks and batches of `benchmarks.compare`. Medians, and the spread (largest less smallest) of an iteration "
        "in per cent.",
        "",
        "| environment | device | cores | runs | N x T | steps/s | trace, compile | first iteration | iteration "
        "| spread | draw, rollout, advantages, update | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        middle = np.median(r["iteration"])
        spread = 100 * (max(r["iteration"]) - min(r["iteration"])) / middle
        inside = ", ".join(
            f"{1000 * np.median(r[part]):.2f}"
            for part in ("draw", "rollout", "advantages", "update")
            if part in r
        )
        lines.append(
            f"| {r['env']} | {r['device']} | {r['cores']} | {r['num_seeds']:,} "
            f"| {r['num_envs']} x {r['num_steps']} | {r['steps_per_second']:,.0f} | {r['trace']:.1f} s, {r['compile']:.1f} s "
            f"| {1000 * r['first_iteration']:.1f} ms | {1000 * middle:.2f} ms | {spread:.0f}% "
            f"| {inside and inside + ' ms'} | {r['peak_bytes'] / 2**30:.2f} GiB |"
        )
    lines += [
        "",
        "The least time an update can take: its matrix products at the rate of one of 1024 x 1024, "
        "its activations at that of tanh, its bytes at that of a copy of 64 MiB, all measured in the "
        "same run. Above 100% is what stays in the cache, as the parameters do.",
        "",
        "| environment | device | cores | N x T | products, activations, bytes | least | measured | fraction |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r["num_seeds"] > 1:
            continue
        least = ", ".join(
            f"{1000 * r[f'least_{part}']:.2f}" for part in ("products", "activations", "bytes")
        )
        lines.append(
            f"| {r['env']} | {r['device']} | {r['cores']} | {r['num_envs']} x {r['num_steps']} | {least} ms "
            f"| {1000 * r['least_update']:.2f} ms | {1000 * np.median(r['update']):.2f} ms "
            f"| {100 * r['fraction']:.0f}% |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, and writes `results/throughput.json` and `.md`; what is not asked for is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--num-seeds", type=int, default=1, help="runs, all at once")
    help_ = "with the sizes and networks that benchmarks.compare has"
    parser.add_argument("--as-rejax", action="store_true", help=help_)
    parser.add_argument("--dense", choices=["auto", "xla", "fused"], default="auto")
    parser.add_argument("--kernels", action="store_true", help="prints where an iteration goes")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    result = measure(**vars(given))
    for name, (count, seconds) in itertools.islice(result.pop("kernels", {}).items(), 30):
        print(f"{1000 * seconds:8.3f} ms {count:6} x {name}")
    results = load("throughput", [])
    same = ("env", "num_seeds", "num_envs", "num_steps", "cores", "device")
    results = [r for r in results if any(r[key] != result[key] for key in same)] + [result]
    text = table(results)
    save("throughput", results, text)
    print(text)


if __name__ == "__main__":
    main()
