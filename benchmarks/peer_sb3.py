"""A training by Stable-Baselines3 or SBX, run with an interpreter that has it installed.

    python peer_sb3.py '{"peer": "sb3", "env": "CartPole-v1", "num_envs": 4, "num_steps": 128,
        "iterations": 40}'

Prints the steps per second after a first iteration, in which SBX compiles; and with "episodes" the mean
return of so many deterministic ones. On the CPU: the network is too small for anything else, or none is
there.
"""

import importlib
import json
import sys
import time

from stable_baselines3.common.env_util import (  # pyright: ignore[reportMissingImports]
    make_atari_env,
    make_vec_env,
)
from stable_baselines3.common.evaluation import (  # pyright: ignore[reportMissingImports]
    evaluate_policy,
)
from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
    VecFrameStack,
    VecNormalize,
)


def environments(task, num_envs):
    """As the task has them: Atari's frames, normalised where returns are asked for, or plain."""
    if task.get("atari"):
        importlib.import_module("ale_py")
        return VecFrameStack(make_atari_env(task["env"], num_envs, seed=task["seed"]), 4)
    plain = make_vec_env(task["env"], num_envs, seed=task.get("seed"))
    if not task.get("episodes"):
        return plain
    return VecNormalize(plain, gamma=task["hyper"]["gamma"])


def main() -> None:
    """Trains with the defaults of PPO but for the sizes and "hyper"; both networks have 2 x 64 tanh units."""
    task = json.loads(sys.argv[1])
    module = importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[task["peer"]])
    batch = task["num_envs"] * task["num_steps"]
    env = environments(task, task["num_envs"])
    model = module.PPO(
        "CnnPolicy" if task.get("atari") else "MlpPolicy",
        env,
        n_steps=task["num_steps"],
        batch_size=task.get("batch_size", batch // 4),
        n_epochs=task.get("epochs", 4),
        seed=task.get("seed"),
        device="cpu",
        **task.get("hyper", {}),
    )
    model.learn(batch)
    started = time.perf_counter()
    model.learn(batch * task["iterations"], reset_num_timesteps=False)
    print(batch * task["iterations"] / (time.perf_counter() - started))
    if "episodes" not in task:
        return
    score = float("nan")
    if task["episodes"]:
        unseen = environments(task | {"seed": task["seed"] + 10**6}, 1)
        unseen.training, unseen.norm_reward, unseen.obs_rms = False, False, env.obs_rms
        score, _ = evaluate_policy(model, unseen, task["episodes"])
    print(score)


if __name__ == "__main__":
    main()
