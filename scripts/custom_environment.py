"""An environment of your own, trained by name and from Python.

    python -m purejaxppo.run --env scripts.custom_environment:Corridor --env-args length=6
    python -m scripts.custom_environment

The agent stands in a corridor, sees where it is, and is paid for reaching the right end in time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from purejaxppo import Config, Hyper, make_train, register
from purejaxppo.spaces import Box, Discrete
from purejaxppo.types import TimeStep


class CorridorState(struct.PyTreeNode):
    """Where the agent stands."""

    position: Array  # [] float32, 0 ... length


class Corridor:
    """The `Environment` protocol of `purejaxppo.envs.base`: spaces, a time limit, reset and step.

    Resetting, the clock and the statistics of episodes are the trainer's business.

    Args:
        length: steps from the left end to the goal.
    """

    action_space = Discrete(2)  # left, right
    max_episode_steps = 50  # kept by the trainer, which bootstraps when it cuts an episode
    may_truncate = False  # there is no other reason why `step` would set `truncated`

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.observation_space = Box(0.0, 1.0, (1,))

    def reset(self, key: Array) -> tuple[CorridorState, Array]:
        """(state, obs [1]) somewhere in the left half; consumes key."""
        state = CorridorState(jnp.floor(jax.random.uniform(key) * self.length / 2))
        return state, self._observe(state)

    def step(
        self, key: Array, state: CorridorState, action: Array
    ) -> tuple[CorridorState, TimeStep]:
        """One step to either side; key is not needed."""
        position = jnp.clip(state.position + 2 * action - 1, 0, self.length)
        state = CorridorState(position.astype(jnp.float32))
        goal = position == self.length
        return state, TimeStep(
            obs=self._observe(state),
            reward=jnp.where(goal, 1.0, -0.01),
            terminated=goal,
            truncated=jnp.zeros((), bool),
        )

    def _observe(self, state: CorridorState) -> Array:
        return state.position[None] / self.length


def main() -> None:
    """Trains four seeds in one jitted program and prints their last returns."""
    register("Corridor", Corridor)
    config = Config(env="Corridor", total_timesteps=25_000, num_envs=8, num_steps=64)
    train = jax.jit(jax.vmap(make_train(config), in_axes=(0, None)))
    _, metrics = train(jax.random.split(jax.random.key(0), 4), Hyper(learning_rate=1e-3))
    print("return of each seed:", metrics.episode_return[:, -1])


if __name__ == "__main__":
    main()
