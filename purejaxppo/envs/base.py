"""What an environment is to the trainer, and the only auto-reset, clock and episode statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import chex
import jax
import jax.custom_batching
import jax.numpy as jnp
from flax import struct
from jax import Array

from purejaxppo.spaces import Box, Space
from purejaxppo.types import Episode, PyTree, TimeStep
from purejaxppo.values import ConfigError

SPACES = ("observation_space", "action_space")


class Described(Protocol):
    """What is known of an environment before it runs.

    Attributes:
        max_episode_steps: the time limit, kept by `Vectorized`; None for none.
        may_truncate: whether `step` sets `truncated` by itself, for a reason other than that limit. A
            step that does so although it says that it never will is an end, and not valid.
    """

    @property
    def observation_space(self) -> Space: ...
    @property
    def action_space(self) -> Space: ...
    @property
    def max_episode_steps(self) -> int | None: ...
    @property
    def may_truncate(self) -> bool: ...


class Environment(Described, Protocol):
    """One environment, without any reset of its own."""

    def reset(self, key: Array) -> tuple[PyTree, Array]:
        """(state, obs) of a new episode."""
        ...

    def step(self, key: Array, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """The next state, whose `obs` is the final one where the episode ended."""
        ...


class VectorEnvironment(Described, Protocol):
    """N environments that begin a new episode by themselves: what the trainer sees.

    A state has a field `obs` [N, ...], what to act on next.

    Attributes:
        external: whether they live outside of the program. Such environments reset one step late (the
            step after an end is not valid, and what it acts on is the final observation), and they
            cannot be saved, divided among devices, or called by a program from the cache.
        in_lanes: whether steps are computed as `lanes.batched_last` does, for which XLA is set up.
        pool_size: P, start states of each environment that a rollout begins with; 0 for none.
    """

    @property
    def num_envs(self) -> int: ...
    @property
    def external(self) -> bool: ...
    @property
    def in_lanes(self) -> bool: ...
    @property
    def pool_size(self) -> int: ...

    def prepare(self) -> None:
        """To be called on the host before each program that calls `reset`."""
        ...

    def reset(self, key: Array) -> Any:
        """The state at the start of N episodes; key [N]."""
        ...

    def begin_rollout(self, key: Array, state: Any) -> Any:
        """Draws what a rollout needs, such as start states; key [P, N]. An evaluation does without."""
        ...

    def end_rollout(self, state: Any) -> Any:
        """Drops what only a rollout needs."""
        ...

    def step(self, key: Array, state: Any, action: Array) -> tuple[Any, TimeStep, Episode]:
        """One step of each; key [N], action [N, ...]."""
        ...


class Starts(struct.PyTreeNode):
    """Start states of episodes."""

    state: PyTree  # [P, N, ...]
    obs: Array  # [P, N, ...]


class VectorState(struct.PyTreeNode):
    """State of N environments."""

    env: PyTree  # [N, ...], without arrays that are empty
    obs: Array  # [N, ...] what to act on next
    score: Array  # [N] float32, of the episode so far
    length: Array  # [N] int32, steps of the episode so far: the clock
    pool: Starts | None  # where ended episodes start again, in a rollout
    pool_index: Array  # [] int32, which step of the rollout comes next: it has entry pool_index % P


@dataclass(frozen=True, eq=False)
class Vectorized:
    """A VectorEnvironment of N copies of an Environment; equal where these are the same object.

    Attributes:
        pool_size: P. The start states of an environment are drawn at the start of a rollout; where
            its episode ends at step t it continues from entry t % P. Between rollouts there is no
            pool, and an environment whose episode has ended is stepped on. With P = 0 every
            environment is reset at every step, and what is needed kept: exact and dear.
    """

    env: Environment
    num_envs: int
    pool_size: int = 8
    external = False

    def _identity(self) -> tuple[int, ...]:
        return id(self.env), self.num_envs, self.pool_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vectorized) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    @property
    def in_lanes(self) -> bool:
        return getattr(self.env, "in_lanes", False)

    @property
    def observation_space(self) -> Space:
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        return self.env.action_space

    @property
    def max_episode_steps(self) -> int | None:
        return self.env.max_episode_steps

    @property
    def may_truncate(self) -> bool:
        return self.env.may_truncate

    def prepare(self) -> None:
        """Nothing: it is all in the state."""

    def reset(self, key: Array) -> VectorState:
        """The state at the start of N episodes; key [N], each consumed."""
        chex.assert_shape(key, (self.num_envs,), custom_message="key of reset")
        starts = self._draw(key)
        zeros = jnp.zeros(self.num_envs)
        return VectorState(
            starts.state, starts.obs, zeros, zeros.astype(jnp.int32), None, jnp.zeros((), jnp.int32)
        )

    def begin_rollout(self, key: Array, state: VectorState) -> VectorState:
        """Draws the pool of start states; key [P, N], each consumed."""
        if not self.pool_size:
            return state
        expected = self.pool_size, self.num_envs
        chex.assert_shape(key, expected, custom_message="key of begin_rollout")
        pool = self._draw(key)
        return state.replace(pool=pool, pool_index=jnp.zeros((), jnp.int32))

    def end_rollout(self, state: VectorState) -> VectorState:
        """The state without the pool."""
        return state.replace(pool=None)

    def step(
        self, key: Array, state: VectorState, action: Array
    ) -> tuple[VectorState, TimeStep, Episode]:
        """One step of each environment, and a new episode where one ended.

        A step whose observation or reward is not finite ends the episode, with zeros in their
        place, and is not valid.

        Args:
            key: [N], each consumed.
            action: [N, A...], flat where the action space is a Box.
        """
        action = action.reshape(self.num_envs, *self.action_space.shape)
        key_step, key_reset = key, key
        if not self.pool_size:
            key_step, key_reset = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
        env, raw = jax.vmap(self.env.step)(key_step, self._filled(state.env), action)
        env = _without_empty(env)
        length = state.length + 1
        timestep = self._checked(raw, length)
        score = state.score + timestep.reward
        ended = timestep.terminated | timestep.truncated
        # In the types that it came with, which a rollout's pool would bring about as well.
        start = jax.tree.map(
            lambda x, before: _as_dtype(x, before.dtype),
            Starts(env, timestep.obs),
            Starts(state.env, state.obs),
        )
        pool_index = state.pool_index
        if not self.pool_size:
            start = self._draw(key_reset)
        elif state.pool is not None:
            pick = jax.lax.dynamic_index_in_dim
            index = pool_index % self.pool_size
            start = jax.tree.map(lambda x: pick(x, index, keepdims=False), state.pool)
            pool_index = pool_index + 1
        after = VectorState(
            env=_select(ended, start.state, env),
            obs=_select(ended, _finite_or_zeros(start.obs), timestep.obs),
            score=jnp.where(ended, 0.0, score),
            length=jnp.where(ended, 0, length),
            pool=state.pool,
            pool_index=pool_index,
        )
        assert timestep.valid is not None
        return after, timestep, Episode(ended, jnp.where(timestep.valid, score, jnp.nan), length)

    def _start(self, key: Array) -> tuple[PyTree, Array]:
        state, obs = self.env.reset(key)
        obs = self._cast(obs)
        chex.assert_shape(obs, self.observation_space.shape, custom_message="obs of reset")
        _check_bytes(obs, self.observation_space)
        return _without_empty(strong_types(state)), obs

    @functools.cached_property
    def _shapes(self) -> PyTree:
        """Of a state of one environment."""
        return jax.eval_shape(self.env.reset, jax.random.key(0))[0]

    def _filled(self, state: PyTree) -> PyTree:
        """States [N, ...] of the environments, with the empty arrays that `_without_empty` took."""
        if not any(map(_is_taken, jax.tree.leaves(state, is_leaf=_is_taken))):
            return state

        def fill(shape: jax.ShapeDtypeStruct, x: Any) -> Any:
            return jnp.zeros((self.num_envs, *shape.shape), shape.dtype) if _is_taken(x) else x

        return jax.tree.map(fill, self._shapes, state)

    def _draw(self, key: Array) -> Starts:
        """Start states [P, N, ...] or [N, ...], one for each key, which it consumes."""
        start = self._start
        for _ in key.shape:
            start = jax.vmap(start)
        return Starts(*start(key))

    def _cast(self, obs: Array) -> Array:
        """Bytes and booleans as they are, other integers as int32, everything else as float32."""
        obs = jnp.asarray(obs)
        if obs.dtype in (jnp.uint8, jnp.bool):
            return obs
        integer = jnp.issubdtype(obs.dtype, jnp.integer)
        return obs.astype(jnp.int32 if integer else jnp.float32)

    def _checked(self, raw: TimeStep, length: Array) -> TimeStep:
        """The time step [N] with its shapes asserted, the time limit kept and NaN left out."""
        batch = (self.num_envs,)
        valid = jnp.ones(batch, bool) if raw.valid is None else raw.valid.astype(bool)
        chex.assert_shape(raw.obs, batch + self.observation_space.shape, custom_message="obs")
        chex.assert_shape(raw.reward, batch, custom_message="reward")
        chex.assert_shape(raw.terminated, batch, custom_message="terminated")
        chex.assert_shape(raw.truncated, batch, custom_message="truncated")
        chex.assert_shape(valid, batch, custom_message="valid")
        reward, obs = raw.reward.astype(jnp.float32), self._cast(raw.obs)
        terminated, truncated = raw.terminated.astype(bool), raw.truncated.astype(bool)
        limit = self.env.max_episode_steps
        late = jnp.zeros(batch, bool) if limit is None else length >= limit
        if not self.env.may_truncate:  # no room is kept for the final observation
            early = truncated & ~(terminated | late)
            terminated, truncated, valid = terminated | early, late, valid & ~early
        return finite_or_ended(TimeStep(obs, reward, terminated, truncated | late), valid)


def _check_bytes(obs: Array, space: Space) -> None:
    """Raises ConfigError where images are bytes 0 ... 255 or their space says so, and not both."""
    if isinstance(space, Box) and len(space.shape) == 3:
        said, given = space.dtype == "uint8", obs.dtype == jnp.uint8
        if said != given and (said or space.bounds[1].max() > 1):
            raise ConfigError(
                f"an episode begins with {obs.dtype}{list(obs.shape)}, and its space is {space}: "
                "bytes are declared as uint8, and nothing else"
            )


def _without_empty(state: PyTree) -> PyTree:
    """A state with () in place of empty arrays, which XLA divides among devices wrongly, if at all."""
    return jax.tree.map(lambda x: x if x.size else (), state)


def _is_taken(x: Any) -> bool:
    return isinstance(x, tuple) and x == ()


def finite_or_ended(step: TimeStep, valid: Array) -> TimeStep:
    """The step [N], which where obs or reward is not finite is an end, not valid, and zeros."""
    finite = _is_finite(step.reward) & jax.vmap(lambda obs: jnp.all(_is_finite(obs)))(step.obs)
    return TimeStep(
        obs=_select(finite, step.obs, jnp.zeros_like(step.obs)),
        reward=jnp.where(finite & valid, step.reward, 0.0),
        terminated=step.terminated | ~finite,
        truncated=step.truncated & finite,
        valid=finite & valid,
    )


def _is_finite(x: Array) -> Array:
    """Whether numbers are, and their squares, which statistics are made of."""
    return jnp.isfinite(jnp.square(x))


def _finite_or_zeros(obs: Array) -> Array:
    """Observations, zeros in place of numbers that are not finite: an episode may begin with such."""
    return jnp.where(_is_finite(obs), obs, jnp.zeros_like(obs))


def finite_start(state: PyTree) -> PyTree:
    """The state of vectorised environments, of which the very first observations are not checked."""
    return state.replace(obs=_finite_or_zeros(state.obs))


def over_runs(function: Callable[..., PyTree], runs: int) -> Callable[..., PyTree]:
    """Makes a function of one run's environments of one of the pool, which holds those of all runs.

    It is to be vmapped over all runs, and then steps them in one call.

    Args:
        function: (handle, argument [R * N, ...]) -> (handle, result [R * N, ...]) of the whole pool.
        runs: R.

    Returns:
        (handle, argument [N, ...]) -> (handle, result [N, ...]).
    """

    def call_all(handle: Array, argument: Array) -> tuple[Array, PyTree]:
        handle, result = function(handle, argument.reshape(-1, *argument.shape[2:]))
        return handle, jax.tree.map(lambda x: x.reshape(runs, -1, *x.shape[1:]), result)

    @jax.custom_batching.custom_vmap
    def call(handle: Array, argument: Array) -> tuple[Array, PyTree]:
        # Of several runs this is never executed, only traced for the shapes of one.
        handle, result = call_all(handle, jnp.stack([argument] * runs))
        return handle, jax.tree.map(lambda x: x[0], result)

    @call.def_vmap
    def _(size: int, batched: Any, handle: Array, argument: Array) -> tuple[PyTree, PyTree]:
        assert size == runs, "vmapped over other runs than there are in the pool"
        handle, result = call_all(handle[0] if batched[0] else handle, argument)
        out = jnp.stack([handle] * runs), result
        return out, jax.tree.map(lambda _: True, out)

    return call


def begins(env: VectorEnvironment, timestep: TimeStep, episode: Episode) -> Array:
    """[N] bool, whether what is acted on after a step begins an episode.

    Environments outside of the program are reset one step late, by a step that is not valid.
    """
    if env.external and timestep.valid is not None:
        return ~timestep.valid
    return episode.ended


def strong_types(tree: PyTree) -> PyTree:
    """The same arrays without weak types, which would compile everything twice."""
    return jax.tree.map(lambda x: _as_dtype(x, jnp.asarray(x).dtype), tree)


def _as_dtype(x: Array, dtype: Any) -> Array:
    return (
        x if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jax.lax.convert_element_type(x, dtype)
    )


def _select(condition: Array, chosen: PyTree, other: PyTree) -> PyTree:
    """Leaves [N, ...] of `chosen` where condition [N], else of `other`, in the dtypes of `chosen`.

    Raises:
        ConfigError: that would round numbers to whole ones, or cut off digits of those.
    """

    def select(a: Array, b: Array) -> Array:
        chex.assert_equal_shape([a, b])
        holds = a.dtype == b.dtype or jnp.issubdtype(a.dtype, jnp.inexact)
        if not (holds or jnp.promote_types(a.dtype, b.dtype) == a.dtype):
            raise ConfigError(
                f"an episode begins with {a.dtype}{list(a.shape[1:])} where a step gives {b.dtype}: "
                "the environment's reset should give the same"
            )
        mask = condition.reshape(condition.shape + (1,) * (a.ndim - 1))
        return jnp.where(mask, a, _as_dtype(b, a.dtype))

    return jax.tree.map(select, chosen, other)
