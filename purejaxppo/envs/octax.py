"""Octax: CHIP-8 arcade games as pixels of 64 x 32, emulated wholly on the device."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
from jax import Array

from purejaxppo import spaces
from purejaxppo.envs.checks import check_positive
from purejaxppo.types import PyTree, TimeStep
from purejaxppo.values import ConfigError, check_arguments

_ARGUMENTS = ("max_num_steps_per_episodes", "instruction_frequency", "fps", "frame_skip")


class OctaxEnvironment:
    """A game as an `Environment`: the frames since the last step are the channels of an image."""

    may_truncate = False

    def __init__(self, env: Any) -> None:
        self._env = env
        self.observation_space = spaces.Box(0.0, 255.0, (32, 64, env.frame_skip), "uint8")
        self.action_space = spaces.Discrete(env.num_actions)
        self.max_episode_steps: int | None = env.max_num_steps_per_episodes

    def reset(self, key: Array) -> tuple[PyTree, Array]:
        """(state, obs) of a new episode; consumes key, of which the game's own chance is made."""
        with _quietly():
            state, frames, _ = self._env.reset(key)
        return state, _image(frames)

    def step(self, key: Array, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """One step; the last action presses no key."""
        del key
        with _quietly():
            state, frames, reward, terminated, _, _ = self._env.step(state, action)
        ended = jnp.asarray(terminated)
        return state, TimeStep(_image(frames), reward, ended, jnp.zeros_like(ended))


def _quietly() -> warnings.catch_warnings[None]:
    """Without JAX's warnings of the emulator's types."""
    return warnings.catch_warnings(action="ignore", category=FutureWarning)


def _image(frames: Array) -> Array:
    """[32, 64, F] bytes of F displays [F, 64, 32] that are on or off."""
    return (frames.T > 0).astype(jnp.uint8) * 255


def make(name: str, env_args: dict[str, Any]) -> OctaxEnvironment:
    """A game by its name there, after `octax/`.

    Raises:
        ConfigError: an unknown argument, or Octax is not installed.
    """
    try:
        from octax.environments import (  # pyright: ignore[reportMissingImports]
            create_environment,
        )
    except ImportError as error:
        raise ConfigError(f"{name}: {error}: pip install 'purejaxppo[octax]'") from None
    check_arguments(name, env_args, _ARGUMENTS)
    game = name.removeprefix("octax/")
    check_positive(env_args)
    with _quietly():
        env, _ = create_environment(game, render_mode="rgb_array", **env_args)
    return OctaxEnvironment(env)
