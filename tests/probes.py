"""Environments so small that what an agent must learn in them is known in closed form.

Frozen dataclasses, so that two of the same kind share their compiled programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from purejaxppo.spaces import Box, Discrete
from purejaxppo.types import TimeStep

INF = float("inf")
ZERO, NO = jnp.zeros, lambda: jnp.zeros((), bool)


@dataclass(frozen=True)
class Probe:
    """One number to see and two actions; without a time limit unless a subclass says otherwise."""

    max_episode_steps: int | None = None
    may_truncate: bool = False

    observation_space: ClassVar[Any] = Box(-INF, INF, (1,))
    action_space: ClassVar[Any] = Discrete(2)


@dataclass(frozen=True)
class ConstantReward(Probe):
    """Episodes of one step that earn 1: V = 1."""

    def reset(self, key):
        return ZERO(()), jnp.ones(1)

    def step(self, key, state, action):
        return state, TimeStep(jnp.ones(1), jnp.ones(()), ~NO(), NO())


@dataclass(frozen=True)
class ObservationReward(Probe):
    """Episodes of one step that earn what is seen, -1 or 2: V(obs) = obs."""

    def reset(self, key):
        obs = jnp.where(jax.random.bernoulli(key), 2.0, -1.0)
        return obs, obs[None]

    def step(self, key, state, action):
        return state, TimeStep(state[None], state, ~NO(), NO())


@dataclass(frozen=True)
class ActionReward(Probe):
    """Episodes of one step that earn 1 for action 1 where 1 is seen, for 0 where -1 is; else -1."""

    def reset(self, key):
        obs = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        return obs, obs[None]

    def step(self, key, state, action):
        reward = jnp.where((state > 0) == (action == 1), 1.0, -1.0)
        return state, TimeStep(state[None], reward, ~NO(), NO())


@dataclass(frozen=True)
class DelayedReward(Probe):
    """Episodes of two steps, 0 and 1 are seen, only the second earns 1: V(1) = 1, V(0) = gamma."""

    def reset(self, key):
        return ZERO(()), jnp.zeros(1)

    def step(self, key, state, action):
        return state + 1, TimeStep((state + 1)[None], state, state == 1, NO())


@dataclass(frozen=True)
class TimeLimit(Probe):
    """Always the same is seen and 1 earned, and only the clock ends an episode: V = 1/(1-gamma).

    With `terminal` every step also terminates, which wins: V = 1.
    """

    max_episode_steps: int | None = 3
    terminal: bool = False

    def reset(self, key):
        return ZERO(()), jnp.ones(1)

    def step(self, key, state, action):
        return state, TimeStep(jnp.ones(1), jnp.ones(()), jnp.asarray(self.terminal), NO())


@dataclass(frozen=True)
class Unusual(Probe):
    """Begins with numbers, one of them none, goes on with whole ones, and has an empty array.

    Episodes last five steps and earn 5.
    """

    max_episode_steps: int | None = 5
    shape: tuple[int, ...] = (2,)
    observation_space: ClassVar[Any] = property(lambda self: Box(-INF, INF, self.shape))

    def reset(self, key):
        obs = jnp.ones(self.shape).at[(0,) * len(self.shape)].set(jnp.nan)
        return {"empty": jnp.zeros((0, 3)), "steps": jnp.zeros(())}, obs

    def step(self, key, state, action):
        state = {"empty": state["empty"], "steps": state["steps"].astype(jnp.int32) + 1}
        obs = jnp.ones(self.shape, jnp.int32)
        return state, TimeStep(obs, jnp.ones(()), NO(), NO())


@dataclass(frozen=True)
class ContinuousTarget(Probe):
    """Episodes of one step that earn -(a - 0.3)^2, on a box whose centre is 0.75: a = 0.3."""

    action_space: ClassVar[Any] = Box(-0.5, 2.0, (1,))

    def reset(self, key):
        return ZERO(()), jnp.ones(1)

    def step(self, key, state, action):
        return state, TimeStep(jnp.ones(1), -jnp.square(action[0] - 0.3), ~NO(), NO())


@dataclass(frozen=True)
class Clock(Probe):
    """Shows (START + steps so far, lifetime): a step always leads from (c, l) to (c + 1, l).

    So the final observation of every episode follows from the one before, and no other step can
    be taken for it. The episode ends by itself after its lifetime, in 1 ... 2 * mean_life - 1.
    """

    mean_life: int = 5
    START: ClassVar[float] = 10.0
    observation_space: ClassVar[Any] = Box(-INF, INF, (2,))

    def reset(self, key):
        life = jax.random.randint(key, (), 1, 2 * self.mean_life).astype(jnp.float32)
        state = jnp.stack([jnp.asarray(self.START), life])
        return state, state

    def step(self, key, state, action):
        state = state + jnp.array([1.0, 0.0])
        over = state[0] - self.START >= state[1]
        reward = 0.1 * state[0] + action
        terminated = over & (not self.may_truncate)
        return state, TimeStep(state, reward, terminated, over & self.may_truncate)


@dataclass(frozen=True)
class Poisoned(Probe):
    """A walk around 50 * scale with time limit 6; where `bad`, its third step is not finite.

    What is seen is (where it is, steps so far, bad or not). The poison is reward or an entry of the
    observation; "" for none, everything else alike.
    """

    max_episode_steps: int | None = 6
    poison: str = ""
    value: float = float("nan")
    scale: float = 1.0
    observation_space: ClassVar[Any] = Box(-INF, INF, (3,))

    def reset(self, key):
        key_place, key_bad = jax.random.split(key)
        bad = jax.random.bernoulli(key_bad, 0.2).astype(jnp.float32)
        place = 50 + 20 * jax.random.normal(key_place)
        state = jnp.stack([self.scale * place, ZERO(()), bad])
        return state, state

    def step(self, key, state, action):
        move = jax.random.normal(key) + action
        state = state + jnp.stack([self.scale * move, jnp.ones(()), ZERO(())])
        struck = (state[1] == 3) & (state[2] == 1)
        reward = jnp.where(struck & (self.poison == "reward"), self.value, 0.1 * state[0])
        seen = jnp.where(struck & (self.poison == "obs"), state.at[1].set(self.value), state)
        return state, TimeStep(seen, reward, NO(), NO())


@dataclass(frozen=True)
class Recall(Probe):
    """Episodes of three steps, of which the first shows -1 or 1 and the last earns 1 for the action it asks for.

    Without memory that is a guess. With a limit of 2 steps there is nothing to earn.
    """

    def reset(self, key):
        sign = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        return jnp.stack([sign, ZERO(())]), sign[None]

    def step(self, key, state, action):
        sign, steps = state
        over = steps == 2
        right = (sign > 0) == (action == 1)
        state = jnp.stack([sign, steps + 1])
        return state, TimeStep(jnp.zeros(1), jnp.where(over & right, 1.0, 0.0), over, NO())


@dataclass(frozen=True)
class Bits(Probe):
    """Images of zeros and ones, as MinAtar's, that turn round; earns 1 a step where the first is set."""

    max_episode_steps: int | None = 20
    observation_space: ClassVar[Any] = Box(0.0, 1.0, (10, 10, 4))

    def reset(self, key):
        bits = jax.random.bernoulli(key, 0.2, (10, 10, 4))
        return bits, bits

    def step(self, key, state, action):
        state = jnp.roll(state, action, axis=0)
        return state, TimeStep(state, state[0, 0, 0].astype(jnp.float32), NO(), NO())


@dataclass(frozen=True)
class Misshapen(Probe):
    """Gives one field of its time step an axis too many."""

    field: str = "reward"

    def reset(self, key):
        return ZERO(()), jnp.ones(1)

    def step(self, key, state, action):
        step = TimeStep(jnp.ones(1), jnp.ones(()), NO(), NO(), ~NO())
        return state, step.replace(**{self.field: getattr(step, self.field)[None]})
