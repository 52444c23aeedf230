"""A training by Stable-Baselines3 or SBX, run with an interpreter that has it installed.

    python peer_sb3.py '{"peer": "sb3", "env": "CartPole-v1", "num_envs": 4, "num_steps": 128,
        "iterations": 40}'

Prints the steps per second after a first iteration, in which SBX compiles. On the CPU: the network
is too small for anything else.
"""

import importlib
import json
import sys
import time

from stable_baselines3.common.env_util import (  # pyright: ignore[reportMissingImports]
    make_vec_env,
)


def main() -> None:
    """Trains with the defaults of PPO but for the sizes; both networks have 2 x 64 tanh units."""
    task = json.loads(sys.argv[1])
    module = importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[task["peer"]])
    batch = task["num_envs"] * task["num_steps"]
    model = module.PPO(
        "MlpPolicy",
        make_vec_env(task["env"], task["num_envs"]),
        n_steps=task["num_steps"],
        batch_size=batch // 4,
        n_epochs=4,
        device="cpu",
    )
    model.learn(batch)
    started = time.perf_counter()
    model.learn(batch * task["iterations"], reset_num_timesteps=False)
    print(batch * task["iterations"] / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
