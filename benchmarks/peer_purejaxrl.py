"""A training by PureJaxRL, run with an interpreter that has what it needs, as `benchmarks.peers` makes it.

    python peer_purejaxrl.py '{"source": "where it was cloned", "env": "CartPole-v1", "num_envs": 4,
        "num_steps": 128, "iterations": 100, "num_runs": 1}'

Prints the steps per second of all runs together, compilation left out.
"""

import importlib
import json
import sys
import time
import types

import jax


def main() -> None:
    """Trains with the settings of its script but for the sizes."""
    task = json.loads(sys.argv[1])
    sys.path.insert(0, task["source"] + "/purejaxrl")
    # Its wrappers import it, for other environments.
    sys.modules["navix"] = types.ModuleType("navix")
    num_runs = task["num_runs"]
    steps = task["num_envs"] * task["num_steps"] * task["iterations"]
    config = {
        "ENV_NAME": task["env"],
        "NUM_ENVS": task["num_envs"],
        "NUM_STEPS": task["num_steps"],
        "TOTAL_TIMESTEPS": steps,
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4,
        "LR": 2.5e-4,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ANNEAL_LR": True,
    }
    train = importlib.import_module("ppo").make_train(config)
    keys = jax.random.key(0) if num_runs == 1 else jax.random.split(jax.random.key(0), num_runs)
    compiled = jax.jit(train if num_runs == 1 else jax.vmap(train)).lower(keys).compile()
    started = time.perf_counter()
    jax.block_until_ready(compiled(keys))
    print(num_runs * steps / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
