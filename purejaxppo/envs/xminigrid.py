"""XLand-MiniGrid (the extra `xminigrid`): MiniGrid's tasks on the device."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, nn

from purejaxppo import spaces
from purejaxppo.envs.checks import check_positive
from purejaxppo.types import PyTree, TimeStep
from purejaxppo.values import ConfigError, check_arguments


class XMiniGridEnvironment:
    """A task as an `Environment`, whose state is the package's own time step.

    What the agent sees are cells before it, each a tile and a colour: an image with a channel for each of
    either, one of them set. It does not see which way it looks, nor what it carries.

    Args:
        env: in the package's style.
        params: its parameters.
    """

    may_truncate = False

    def __init__(self, env: Any, params: Any) -> None:
        from xminigrid.core import constants  # pyright: ignore[reportMissingImports]

        self._env = env
        self._params = params
        self._kinds = constants.NUM_TILES, constants.NUM_COLORS
        shape = (params.view_size, params.view_size, sum(self._kinds))
        self.observation_space = spaces.Box(0.0, 1.0, shape, "bool")
        self.action_space = spaces.Discrete(env.num_actions(params))
        self.max_episode_steps: int | None = params.max_steps

    def reset(self, key: Array) -> tuple[PyTree, Array]:
        """(state, obs) of a new episode; consumes key."""
        state = self._env.reset(self._params, key)
        return state, self._image(state)

    def step(self, key: Array, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """One step, without chance."""
        del key
        state = self._env.step(self._params, state, action)
        terminated = state.discount == 0
        obs = self._image(state)
        return state, TimeStep(obs, state.reward, terminated, jnp.zeros_like(terminated))

    def render(self, state: PyTree) -> np.ndarray:
        """A picture [H, W, 3] of the whole grid."""
        return np.asarray(self._env.render(self._params, state))

    def _image(self, state: PyTree) -> Array:
        """[V, V, tiles + colours] booleans of what is seen."""
        seen = jnp.moveaxis(state.observation, -1, 0)
        each = [nn.one_hot(x, n, dtype=bool) for x, n in zip(seen, self._kinds, strict=True)]
        return jnp.concatenate(each, axis=-1)


def make(name: str, env_args: dict[str, Any]) -> XMiniGridEnvironment:
    """The environment `xminigrid/<name>`.

    Args:
        env_args: fields of its parameters, as height, width, view_size and max_steps.

    Raises:
        ConfigError: the package is not installed, or an argument that it does not have.
    """
    try:
        from xminigrid.registration import (  # pyright: ignore[reportMissingImports]
            make as make_task,
        )
    except ImportError as error:
        raise ConfigError(f"{name}: {error}: pip install 'purejaxppo[xminigrid]'") from None
    env, params = make_task(name.removeprefix("xminigrid/"))
    check_arguments(name, env_args, vars(params).keys() - {"render_mode"})
    check_positive(env_args)
    return XMiniGridEnvironment(env, params.replace(**env_args))
