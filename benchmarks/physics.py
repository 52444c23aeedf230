"""How much of a rollout is physics, and what fresh start states cost.

    python -m benchmarks.physics
    python -m benchmarks.physics --env halfcheetah --backend generalized --num-envs 64

Steps per second of the same number of steps by bare physics with random actions and no resets, by
the trainer's rollout, and by a rollout whose episodes replay their first states, as with Brax's
wrapper. Alternating; nothing else should be running.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from purejaxppo import envs, machine, ppo, rollouts
from purejaxppo.agent import make_agent
from purejaxppo.effort import compiler_options
from purejaxppo.envs import load_settings
from purejaxppo.envs.base import Starts, Vectorized
from purejaxppo.train import as_arrays

RESULT = Path(__file__).parent / "results" / "physics.md"
TEXTS = {
    "physics": "bare physics, random actions, no resets",
    "rollout": "rollout of the trainer, fresh start states",
    "replayed": "rollout, first states replayed",
}


class Replayed(Vectorized):
    """Episodes begin again where their environments are when the rollout begins."""

    def begin_rollout(self, key: jax.Array, state: Any) -> Any:
        del key
        first = jax.tree.map(lambda x: x[None], Starts(state.env, state.obs))
        return state.replace(pool=first)


def compiled(setup: rollouts.Setup, function: Any, *arguments: Any) -> tuple[Any, float]:
    """The program, as the trainer compiles it, and the seconds that took."""
    options = compiler_options(setup)
    started = time.perf_counter()
    program = jax.jit(function, compiler_options=options).lower(*arguments).compile()
    return program, time.perf_counter() - started


def programs(name: str, backend: str, num_envs: int, num_steps: int) -> dict[str, Any]:
    """Name -> (program, its arguments, seconds to compile)."""
    settings = load_settings(f"brax/{name}", backend=backend)
    config = replace(settings.config, num_envs=num_envs, num_steps=num_steps, num_minibatches=1)
    env = envs.make(config.env, config.env_options)
    agent = make_agent(config, env.observation_space, env.action_space)
    hyper, key = as_arrays(settings.hyper), jax.random.key(0)

    def bare(state: Any, key: jax.Array) -> Any:
        shape = (num_steps, num_envs, *env.action_space.shape)
        actions = jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
        keys = jax.random.split(key, num_envs)

        def step(state: Any, action: jax.Array) -> Any:
            state, timestep = jax.vmap(env.step)(keys, state, action)
            return state, (timestep.obs, timestep.reward)

        return jax.lax.scan(step, state, actions)

    found = {}
    for label, kind in (("rollout", Vectorized), ("replayed", Replayed)):
        setup = rollouts.Setup(config, kind(env, num_envs, pool_size=1), agent)
        state = jax.jit(lambda k, s=setup: ppo.init(s, k, hyper))(key)
        if label == "rollout":
            arguments = state.env_state.env, key
            found["physics"] = (*compiled(setup, bare, *arguments), arguments)
        run = lambda state, key, s=setup: rollouts.rollout(s, state, rollouts.draw(s, key))  # noqa: E731
        found[label] = (*compiled(setup, run, state, key), (state, key))
    return found


def measure(given: argparse.Namespace, name: str) -> str:
    """The table of one environment."""
    found = programs(name, given.backend, given.num_envs, given.num_steps)
    speeds: dict[str, list[float]] = {label: [] for label in found}
    for repeat in range(given.repeats + 1):
        for label, (program, _, arguments) in found.items():
            started = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            if repeat:
                seconds = time.perf_counter() - started
                speeds[label].append(given.num_envs * given.num_steps / seconds)
    lines = [
        f"## {name}, {given.backend}, {given.num_envs} environments, {given.num_steps} steps",
        "",
        "| | steps/s | range | of bare physics | compiles in |",
        "|---|---|---|---|---|",
    ]
    for label, text in TEXTS.items():
        values, physics = speeds[label], speeds["physics"]
        ratio = statistics.median(a / b for a, b in zip(values, physics, strict=True))
        lines.append(
            f"| {text} | {statistics.median(values):,.0f} | {min(values):,.0f} ... "
            f"{max(values):,.0f} | {ratio:.2f} | {found[label][1]:.0f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and writes `results/physics.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", action="append", help="may be repeated; ant and hopper by default")
    parser.add_argument("--backend", default="spring")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    head = (
        "# Physics and rollout\n\nMade by `python -m benchmarks.physics`: "
        f"{given.repeats} alternating repeats, medians. {machine.device_name()}, "
        f"jax {jax.__version__}."
    )
    text = "\n\n".join([head, *(measure(given, name) for name in given.env or ("ant", "hopper"))])
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
