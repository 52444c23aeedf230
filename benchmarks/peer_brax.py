"""Trainings by Brax's own PPO, run by `benchmarks.brax_ppo` in a process of its own.

    python benchmarks/peer_brax.py SETTINGS SEED ...

SETTINGS is JSON (see `Task` there). Prints a line of JSON for every seed.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

warnings.simplefilter("ignore")
# Brax 0.14.2 still calls this; JAX 0.10 has removed it.
jax.device_put_replicated = lambda x, devices: jax.tree.map(  # type: ignore[attr-defined]
    lambda leaf: jnp.stack([leaf] * len(devices)), x
)

from brax import envs  # noqa: E402
from brax.training.agents.ppo import networks, train  # noqa: E402


def train_once(task: dict[str, Any], seed: int) -> dict[str, Any]:
    """Evaluations [[steps, return], ...], median steps per second of epochs, seconds in all.

    Steps are the agent's; Brax counts those of the environment.

    The first two epochs are left out of the speed: Brax compiles in both.
    """
    evaluations, speeds = [], []
    repeat = task["action_repeat"]

    def progress(steps: int, metrics: Mapping[str, Any]) -> None:
        evaluations.append([int(steps) // repeat, float(metrics["eval/episode_reward"])])
        speeds.append(float(metrics.get("training/sps", 0.0)) / repeat)

    factory = functools.partial(
        networks.make_ppo_networks,
        policy_hidden_layer_sizes=tuple(task["policy_layers"]),
        value_hidden_layer_sizes=tuple(task["value_layers"]),
    )
    started = time.perf_counter()
    train.train(
        environment=envs.get_environment(task["env"], backend=task["backend"]),
        num_timesteps=task["steps"] * repeat,
        num_evals=task["evaluations"] + 1,
        episode_length=1000,
        action_repeat=repeat,
        num_envs=task["num_envs"],
        unroll_length=task["unroll_length"],
        batch_size=task["batch_size"],
        num_minibatches=task["num_minibatches"],
        num_updates_per_batch=task["updates"],
        learning_rate=task["learning_rate"],
        entropy_cost=task["ent_coef"],
        discounting=task["gamma"],
        reward_scaling=task["reward_scale"],
        clipping_epsilon=task["clip_eps"],
        max_grad_norm=task["max_grad_norm"],
        normalize_observations=True,
        deterministic_eval=True,
        num_eval_envs=128,
        network_factory=factory,
        seed=seed,
        progress_fn=progress,
    )
    return {
        "seed": seed,
        "evaluations": evaluations[1:],
        "steps_per_second": statistics.median(speeds[3:]),  # after one for the evaluation at 0
        "speeds": speeds[1:],
        "wall_seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Trains once for every seed."""
    task = json.loads(sys.argv[1])
    for seed in sys.argv[2:]:
        print(json.dumps(train_once(task, int(seed))), flush=True)


if __name__ == "__main__":
    main()
