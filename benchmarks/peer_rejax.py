"""A training by rejax, run with an interpreter that has rejax installed.

    python peer_rejax.py '{"env": "CartPole-v1", "num_envs": 4, "num_steps": 128, "iterations": 100,
        "num_runs": 1}'

Prints the steps per second of all runs together, compilation left out.
"""

import json
import sys
import time

import jax
import rejax  # pyright: ignore[reportMissingImports]


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
    compiled = train.lower(keys).compile()
    started = time.perf_counter()
    jax.block_until_ready(compiled(keys))
    print(num_runs * steps / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
