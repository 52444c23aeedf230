"""Observations that are images: grey, of another size, several frames at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from purejaxppo.config import Config
from purejaxppo.envs.base import VectorEnvironment, begins
from purejaxppo.spaces import Box
from purejaxppo.types import Episode, PyTree, TimeStep
from purejaxppo.values import ConfigError

_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue: ITU-R BT.601


class ImagesState(struct.PyTreeNode):
    """State of N environments, and the last frames of each."""

    env: PyTree
    obs: Array  # [N, H, W, K * C], the latest frame last


@dataclass(frozen=True)
class Images:
    """A VectorEnvironment with the images of another one as they were asked for.

    An episode begins with its first frame K times.

    Attributes:
        frame_stack: K.
    """

    env: VectorEnvironment
    grayscale: bool
    resize: tuple[int, int] | None
    frame_stack: int

    @property
    def observation_space(self) -> Box:
        """Images [H, W, K * C] between the smallest and the largest bound."""
        space = self._space
        height, width, channels = space.shape
        height, width = self.resize or (height, width)
        channels = 1 if self.grayscale else channels
        low, high = float(np.min(space.low)), float(np.max(space.high))
        return Box(low, high, (height, width, self.frame_stack * channels), space.dtype)

    @property
    def _space(self) -> Box:
        space = self.env.observation_space
        assert isinstance(space, Box)
        return space

    @property
    def action_space(self) -> Any:
        return self.env.action_space

    @property
    def max_episode_steps(self) -> int | None:
        return self.env.max_episode_steps

    @property
    def may_truncate(self) -> bool:
        return self.env.may_truncate

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    @property
    def external(self) -> bool:
        return self.env.external

    @property
    def in_lanes(self) -> bool:
        return self.env.in_lanes

    @property
    def pool_size(self) -> int:
        return self.env.pool_size

    def prepare(self) -> None:
        """See `VectorEnvironment`."""
        self.env.prepare()

    def reset(self, key: Array) -> ImagesState:
        """The state at the start of N episodes; key [N], each consumed."""
        state = self.env.reset(key)
        return ImagesState(state, self._start(state.obs))

    def begin_rollout(self, key: Array, state: ImagesState) -> ImagesState:
        """See `VectorEnvironment`; key [P, N], each consumed."""
        return state.replace(env=self.env.begin_rollout(key, state.env))

    def end_rollout(self, state: ImagesState) -> ImagesState:
        """See `VectorEnvironment`."""
        return state.replace(env=self.env.end_rollout(state.env))

    def step(
        self, key: Array, state: ImagesState, action: Array
    ) -> tuple[ImagesState, TimeStep, Episode]:
        """One step of each; key [N], each consumed, action [N, ...]."""
        env, timestep, episode = self.env.step(key, state.env, action)
        frame = self._prepared(timestep.obs)
        obs = jnp.concatenate([state.obs[..., frame.shape[-1] :], frame], -1)
        first = begins(self.env, timestep, episode)[:, None, None, None]
        after = ImagesState(env, jnp.where(first, self._start(env.obs), obs))
        return after, timestep.replace(obs=obs), episode

    def _start(self, obs: Array) -> Array:
        return jnp.tile(self._prepared(obs), self.frame_stack)

    def _prepared(self, obs: Array) -> Array:
        """[N, H, W, C] of the environment's images, in their dtype unless booleans become grey."""
        image = obs
        if self.grayscale:
            image = jnp.dot(image.astype(jnp.float32), jnp.array(_LUMA))[..., None]
        if self.resize:
            shape = (len(obs), *self.resize, image.shape[-1])
            image = jax.image.resize(image.astype(jnp.float32), shape, "linear")
        if jnp.issubdtype(obs.dtype, jnp.integer):
            image = jnp.round(image).astype(obs.dtype)
        return image


def of_environment(state: PyTree) -> PyTree:
    """The state of environments without what is added to it for their images."""
    return state.env if isinstance(state, ImagesState) else state


def prepare_images(config: Config, env: VectorEnvironment) -> VectorEnvironment:
    """The environments, with their images as the configuration wants them.

    Raises:
        ConfigError: it wants something of images, and observations are none.
    """
    asked = {
        "grayscale": config.grayscale,
        "resize": config.resize is not None,
        "frame-stack": config.frame_stack > 1,
    }
    if not any(asked.values()):
        return env
    name, space = next(name for name in asked if asked[name]), env.observation_space
    if len(space.shape) != 3 or (config.grayscale and space.shape[-1] != 3):
        kind = "images [H, W, 3]" if config.grayscale else "images [H, W, C]"
        raise ConfigError(f"--{name}: the observations of {config.env} are {space}, not {kind}")
    return Images(env, config.grayscale, config.resize, config.frame_stack)
