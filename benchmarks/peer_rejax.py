"""A training by rejax, run with an interpreter that has rejax installed.

    python peer_rejax.py '{"env": "CartPole-v1", "num_envs": 4, "num_steps": 128, "iterations": 100,
        "num_runs": 1}'

Prints the steps per second of all runs together, compilation left out. With a "target", an accelerator's
description, it prints the program compiled for that, and its bytes of memory in the first line.
"""

import json
import sys
import time
from typing import Any

import jax
import numpy as np
import rejax  # pyright: ignore[reportMissingImports]
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    """Trains without any evaluation, the initial one included."""
    task = json.loads(sys.argv[1])
    num_runs = task["num_runs"]
    steps = task["num_envs"] * task["num_steps"] * task["iterations"]
    algorithm = rejax.get_algo("ppo").create(
        env=task["env"],
        num_envs=task["num_envs"],
        num_steps=task["num_steps"],
        num_epochs=4,
        num_minibatches=4,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
        agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": "tanh"},
    )
    algorithm = algorithm.replace(eval_callback=lambda *_: ())
    keys = jax.random.key(0) if num_runs == 1 else jax.random.split(jax.random.key(0), num_runs)
    train = jax.jit(algorithm.train if num_runs == 1 else jax.vmap(algorithm.train))
    if "target" in task:
        print_program(train, keys, task["target"])
        return
    compiled = train.lower(keys).compile()
    started = time.perf_counter()
    jax.block_until_ready(compiled(keys))
    print(num_runs * steps / (time.perf_counter() - started))


def print_program(train: Any, keys: jax.Array, target: str) -> None:
    """As compiled for a GPU that is not there."""
    there = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target
    ).devices
    on_it = NamedSharding(Mesh(np.array(there), ("device",)), PartitionSpec())
    shapes = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=on_it)
    program = train.trace(shapes).lower(lowering_platforms=("cuda",)).compile()
    memory = program.memory_analysis()
    print(memory.temp_size_in_bytes + memory.output_size_in_bytes)
    print(program.as_text())


if __name__ == "__main__":
    main()
