"""Craftax (the extra `craftax`): the worlds of Crafter, and its larger descendant, on the device."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from purejaxppo.envs.checks import check_numbers
from purejaxppo.envs.gymnax import convert_space
from purejaxppo.types import PyTree, TimeStep
from purejaxppo.values import ConfigError, check_arguments

_TEXTURE = 16  # pixels of a cell's side in pictures: of the three sizes there are, the middle one


class CraftaxEnvironment:
    """A world as an `Environment`.

    Craftax ends a world that runs out of time as if the player had died. It never does here: the trainer
    keeps the clock, and an episode is truncated after as many steps.

    Args:
        env: one of Craftax's that do not reset themselves.
        params: its parameters.
    """

    may_truncate = False

    def __init__(self, env: Any, params: Any) -> None:
        self._env = env
        self._params = params.replace(max_timesteps=np.iinfo(np.int32).max)
        self.observation_space = convert_space(env.observation_space(params))
        self.action_space = convert_space(env.action_space(params))
        self.max_episode_steps: int | None = params.max_timesteps

    def reset(self, key: Array) -> tuple[PyTree, Array]:
        """(state, obs) of a new world; consumes key."""
        obs, state = self._env.reset_env(key, self._params)
        return state, obs

    def step(self, key: Array, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """One step; consumes key."""
        obs, state, reward, terminated, _ = self._env.step_env(key, state, action, self._params)
        return state, TimeStep(obs, reward, terminated, jnp.zeros_like(terminated))

    def render(self, state: PyTree) -> np.ndarray:
        """A picture [H, W, 3] of what the player sees, and has."""
        return np.asarray(self._draw(state)).astype(np.uint8)

    @functools.cached_property
    def _draw(self) -> Any:
        package = type(self._env).__module__.rpartition(".envs.")[0]
        renderer = importlib.import_module(f"{package}.renderer")
        with _textures():
            return jax.jit(renderer.make_craftax_pixel_renderer(_TEXTURE))


@contextlib.contextmanager
def _textures() -> Iterator[None]:
    """Where Craftax may load its textures, or prepare and keep them beside its code: it tells of either."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except OSError as error:
        raise ConfigError(f"Craftax's textures cannot be prepared: {error}") from None


def make(name: str, env_args: dict[str, Any]) -> CraftaxEnvironment:
    """The environment `craftax/<name>`.

    Args:
        env_args: fields of its parameters, those of the size of the world among them.

    Raises:
        ConfigError: the package is not installed, or an argument that it does not have.
    """
    try:
        from craftax.craftax_env import (  # pyright: ignore[reportMissingImports]
            make_craftax_env_from_name,
        )
    except ImportError as error:
        raise ConfigError(f"{name}: {error}: pip install 'purejaxppo[craftax]'") from None
    with _textures():
        env: Any = make_craftax_env_from_name(name.removeprefix("craftax/"), auto_reset=False)
    params, sizes = env.default_params, env.static_env_params
    known = vars(params) | vars(sizes)
    check_arguments(name, env_args, known)
    check_numbers(env_args, known)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in env_args.items()}
    sizes = sizes.replace(**{k: v for k, v in given.items() if k in vars(sizes)})
    params = params.replace(**{k: v for k, v in given.items() if k in vars(params)})
    return CraftaxEnvironment(type(env)(sizes), params)
