"""EnvPool: Atari, MuJoCo and more in C++, stepped through XLA inside the compiled program.

The environments of all runs are one pool of threads on the host. It resets an environment one step
late: the step after an end ignores its action and leads to the first observation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.experimental.compilation_cache import compilation_cache

from purejaxppo import spaces
from purejaxppo.envs.base import finite_or_ended, over_runs
from purejaxppo.envs.checks import check_numbers
from purejaxppo.envs.gymnax import convert_space
from purejaxppo.machine import num_cores
from purejaxppo.types import Episode, TimeStep
from purejaxppo.values import ConfigError, check_arguments, suggest

# What the trainer decides, not the user.
_OURS = {
    "num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset",
    "base_path", "seed", "env_seed", "task", "gym_reset_return_info",
}  # fmt: skip
# MiB of host memory that an environment takes, the median of five of a suite; of the others measured at most 2.
_MIB = {
    "gfootball": 63, "mujoco.dmc": 17, "mujoco.metaworld": 22, "mujoco.myosuite": 65, "mujoco.playground": 76,
    "mujoco.robotics": 24, "vizdoom": 3,
}  # fmt: skip
_LIVES = 16  # more than a game has: a step each that only goes on after a life


@contextlib.contextmanager
def _its_own_way() -> Iterator[None]:
    """In float64, as MuJoCo's pools have it, and without Gymnasium's warnings of bounds in it."""
    with jax.enable_x64(True), warnings.catch_warnings(action="ignore"):
        yield


@contextlib.contextmanager
def _telling(name: str) -> Iterator[None]:
    """What EnvPool cannot make, as of a library or file that is not there, in one line."""
    try:
        yield
    except (ImportError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason, *_ = " ".join(str(error).split()).split(" The following argument types")
        raise ConfigError(f"{name}: {reason}") from None


class PoolState(struct.PyTreeNode):
    """State of a run's N environments, as far as the program has it."""

    handle: Array  # [8] uint8 of the pool: orders the calls
    obs: Array  # [N, ...] what to act on next, the final one where an episode has ended
    score: Array  # [N] of the game so far
    length: Array  # [N] int32
    ended: Array  # [N] bool: the next step only resets


@dataclass(frozen=True, eq=False)
class EnvPool:
    """An environment of EnvPool; from `vectorize` N of a run, which vmapped over R runs share one pool.

    Attributes:
        seeds: [R] of the runs; the same one gives the same environments, whichever are beside them.
    """

    task: str
    arguments: dict[str, Any]
    observation_space: spaces.Space
    action_space: spaces.Space
    max_episode_steps: int | None
    num_envs: int = 0
    seeds: tuple[np.random.SeedSequence, ...] = ()
    may_truncate: bool = True
    external: bool = True
    in_lanes: bool = False
    pool_size: int = 0

    @functools.cached_property
    @_its_own_way()
    def _pool(self) -> Any:
        import envpool  # pyright: ignore[reportMissingImports]

        words = [seed.generate_state(self.num_envs) >> 1 for seed in self.seeds]  # to fit an int32
        size = {"num_envs": len(words) * self.num_envs, "seed": np.concatenate(words).tolist()}
        size["num_threads"] = min(size["num_envs"], num_cores())
        # A program holds the address of its pool, so no other process may find it in the cache.
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        with _telling(f"envpool/{self.task}"):
            return envpool.make(self.task, env_type="gymnasium", **size, **self.arguments)

    @functools.cached_property
    @_its_own_way()
    def _calls(self) -> tuple[np.ndarray, Callable[..., Any], Callable[..., Any]]:
        """The pool's handle, what it says at first, and what it says to actions."""
        handle, recv, _, step = self._pool.xla()
        dtype = getattr(self.action_space, "dtype", "int32")

        @_its_own_way()
        def first(handle: Array, _: Array) -> Any:
            handle, said = recv(handle)
            return handle, _read(*said)

        @_its_own_way()
        def act(handle: Array, action: Array) -> Any:
            handle, said = step(handle, action.astype(dtype))
            return handle, _read(*said)

        return handle, over_runs(first, len(self.seeds)), over_runs(act, len(self.seeds))

    @property
    def host_bytes(self) -> int:
        """Memory beside the program's that each of them takes, about."""
        from envpool.registration import registry  # pyright: ignore[reportMissingImports]

        module, *_ = registry.specs[self.task]
        return _MIB.get(module.removeprefix("envpool."), 2) * 2**20

    @property
    def rate(self) -> float:
        """Steps a second in real time: of Atari's 60 frames, or as said; of what says nothing, a guess."""
        import envpool  # pyright: ignore[reportMissingImports]

        options = envpool.make_spec(self.task, **self.arguments).config
        if "episodic_life" in options._fields:
            return 60 / options.frame_skip
        return getattr(options, "policy_frequency", 50)

    def frames(self) -> np.ndarray:
        """[R * N, H, W, 3] bytes, where `arguments` have the render_mode rgb_array."""
        return self._pool.render(env_ids=np.arange(len(self._pool)))

    def prepare(self) -> None:
        """Begins new episodes everywhere. On the host, before each program that calls `reset`."""
        self._pool.async_reset()

    def reset(self, key: Array) -> PoolState:
        """The first observations. Chance is the pool's own: key [N] only says over what runs are vmapped."""
        handle, first, _ = self._calls
        nothing = jnp.zeros(self.num_envs) * jax.random.key_data(key)[:, 0]
        handle, (timestep, _) = first(jnp.asarray(handle), nothing)
        zeros = jnp.zeros(self.num_envs)
        return PoolState(handle, timestep.obs, zeros, zeros.astype(jnp.int32), zeros.astype(bool))

    def begin_rollout(self, key: Array, state: PoolState) -> PoolState:
        """The state as it is: a pool makes its start states itself."""
        return state

    def end_rollout(self, state: PoolState) -> PoolState:
        """The state as it is."""
        return state

    def step(
        self, key: Array, state: PoolState, action: Array
    ) -> tuple[PoolState, TimeStep, Episode]:
        """One step of each, not valid where it only resets; action [N, ...], flat for a Box."""
        action = action.reshape(self.num_envs, *self.action_space.shape)
        handle, (raw, game) = self._calls[2](state.handle, action)
        timestep = finite_or_ended(raw, valid=~state.ended)
        score = state.score + jnp.where(state.ended, 0.0, jnp.nan_to_num(game.score))
        length = state.length + ~state.ended
        after = PoolState(
            handle=handle,
            obs=timestep.obs,
            score=jnp.where(game.ended, 0.0, score),
            length=jnp.where(game.ended, 0, length),
            ended=raw.terminated | raw.truncated,
        )
        return after, timestep, Episode(game.ended, score, length)


def _read(
    obs: Array, reward: Array, terminated: Array, truncated: Array, info: Any
) -> tuple[TimeStep, Episode]:
    """What a pool says [N], in float32 and channels last: of the step, and of the whole game."""
    score, over = reward, terminated | truncated
    if "lives" in info:  # Atari, where rewards may be clipped and a life may end an episode
        score, over = info["reward"], (info["terminated"] > 0) | truncated
    if _channels_first(obs.shape[1:], obs.dtype):
        obs = jnp.moveaxis(obs, 1, -1)
    if obs.dtype != jnp.uint8:
        obs = obs.astype(jnp.float32)
    reward, score = reward.astype(jnp.float32), score.astype(jnp.float32)
    return TimeStep(obs, reward, terminated, truncated), Episode(over, score, info["elapsed_step"])


def _channels_first(shape: tuple[int, ...], dtype: Any) -> bool:
    return len(shape) == 3 and np.dtype(dtype) == np.uint8 and shape[0] < shape[2]


def make(name: str, env_args: dict[str, Any]) -> EnvPool:
    """An environment by its name there, after `envpool/`.

    Raises:
        ConfigError: no such environment or argument, one that PPO has no use for, or no EnvPool.
    """
    try:
        import envpool  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"{name}: {error}: pip install 'purejaxppo[envpool]'") from None
    if sys.platform != "linux":
        raise ConfigError(f"{name}: EnvPool steps through XLA on Linux only, not on {sys.platform}")
    task, known = name.removeprefix("envpool/"), envpool.list_all_envs()
    if task not in known:
        raise ConfigError(f"{name}: EnvPool has no {task!r}{suggest(task, known, most=3)}")
    with _its_own_way(), _telling(name):
        defaults = envpool.make_spec(task).config._asdict()
    check_arguments(name, env_args, defaults.keys() - _OURS)
    check_numbers(env_args, defaults)
    with _its_own_way(), _telling(name):
        spec = envpool.make_spec(task, **env_args)
        observations, actions = map(convert_space, (spec.observation_space, spec.action_space))
    if spec.config.max_num_players > 1:
        raise ConfigError(f"{name}: several agents are not supported")
    if _channels_first(observations.shape, getattr(observations, "dtype", None)):
        channels, *sides = observations.shape
        observations = dataclasses.replace(observations, shape=(*sides, channels))
    limit = spec.config.max_episode_steps + _LIVES * ("episodic_life" in spec.config._fields)
    limited = 0 < limit < 2**31 - 1  # by which some mean that there is none
    return EnvPool(task, env_args, observations, actions, limit if limited else None)
