"""Brax's environments on each of its physics backends, and any of their style."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from purejaxppo.envs.base import strong_types
from purejaxppo.envs.checks import check_positive
from purejaxppo.envs.lanes import batched_last
from purejaxppo.spaces import Box
from purejaxppo.types import PyTree, TimeStep
from purejaxppo.values import ConfigError, check_arguments, suggest

BACKENDS = ("spring", "positional", "generalized", "mjx")
_SUPPORTED = {"brax/swimmer": ("generalized",)}  # where not all


class BraxEnvironment:
    """An environment with Brax's raw `reset` and `step`, as an `Environment`.

    Args:
        env: in Brax's style, without any wrapper, whose `step` reads physics and info of a state, as
            Brax's do: nothing else of it is kept. Actions lie in [-1, 1].
        episode_length: time limit in steps of `env`.
        action_repeat: steps of `env` that an action is held for, fewer where the episode ends. The
            limit falls on a whole action, as in Brax.
        reads_obs: keep the observation too, for a `step` that makes the next one of it.

    Attributes:
        in_lanes: whether many are computed as `lanes.batched_last` does.
    """

    may_truncate = False

    def __init__(
        self,
        env: Any,
        episode_length: int = 1000,
        action_repeat: int = 1,
        reads_obs: bool = False,
    ) -> None:
        self._env, self._action_repeat, self._reads_obs = env, action_repeat, reads_obs
        # Physics takes a second to trace, and is part of several programs; inlined it is as if it had
        # been traced for each.
        physics = [jax.jit(f, inline=True) for f in (env.reset, env.step)]
        self.in_lanes = jax.default_backend() == "cpu"
        self._reset, self._step = map(batched_last, physics) if self.in_lanes else physics
        # Its own `observation_size` runs a reset, which takes many seconds.
        with quietly():
            self._obs = jax.eval_shape(self._reset, jax.random.key(0)).obs
        if not hasattr(self._obs, "shape"):
            raise ConfigError(f"observations {self._obs} are not one array, which is not supported")
        self.observation_space = Box(-math.inf, math.inf, self._obs.shape)
        self.action_space = Box(-1.0, 1.0, (env.action_size,))
        self.max_episode_steps: int | None = -(-episode_length // action_repeat)

    def reset(self, key: Array) -> tuple[PyTree, Array]:
        """(state, obs) of a new episode; consumes key."""
        with quietly():
            state = self._reset(key)
        return self._bare(state), state.obs

    def step(self, key: Array, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """One action, held for `action_repeat` steps or to the end of the episode."""
        del key  # the physics is deterministic
        zero = jnp.zeros(())
        obs = state.obs if self._reads_obs else jnp.zeros_like(self._obs)
        start = state.replace(obs=obs, reward=zero, done=zero)

        def once(before: Any, _: None) -> tuple[Any, None]:
            with quietly():
                after = self._step(before.replace(metrics={}), action)
            done = jnp.asarray(after.done, jnp.float32)
            after = after.replace(metrics={}, reward=before.reward + after.reward, done=done)
            after, ended = strong_types(after), before.done > 0
            return jax.tree.map(lambda a, b: jnp.where(ended, a, b), before, after), None

        if self._action_repeat == 1:
            end, _ = once(start, None)
        else:
            end, _ = jax.lax.scan(once, start, length=self._action_repeat)
        no_limit = jnp.zeros((), bool)  # Brax has none of its own
        return self._bare(end), TimeStep(end.obs, end.reward, end.done > 0, no_limit)

    def _bare(self, state: Any) -> Any:
        """What of a state the next step reads; the rest would be carried and selected for nothing."""
        obs = state.obs if self._reads_obs else None
        return state.replace(obs=obs, reward=None, done=None, metrics={})


def backends(name: str) -> tuple[str, ...]:
    """What the environment `brax/<name>` runs on, the default first."""
    return _SUPPORTED.get(name, BACKENDS)


def make(name: str, env_args: dict[str, Any]) -> BraxEnvironment:
    """The environment `brax/<name>`.

    Args:
        env_args: backend, episode_length, action_repeat, and arguments of Brax's own constructor.

    Raises:
        ConfigError: an argument that none of them knows, or a backend that is not supported.
    """
    supported = backends(name)
    backend = env_args.get("backend", supported[0])
    if backend not in supported:
        raise ConfigError(
            f"--backend {backend}: {name} runs on {', '.join(supported)}"
            f"{suggest(str(backend), supported)}"
        )
    arguments = env_args | {"backend": backend}
    wrapping = {k: arguments.pop(k) for k in ("episode_length", "action_repeat") if k in env_args}
    check_positive({k: env_args[k] for k in (*wrapping, "n_frames") if k in env_args})
    with quietly():
        import brax.envs
        import brax.fluid

        brax.fluid.jp = _Numpy()
        factory = brax.envs._envs[name.removeprefix("brax/")]
        known = {p for p in inspect.signature(factory).parameters if p != "kwargs"}
        known |= {"backend", "episode_length", "action_repeat", "n_frames", "debug"}
        check_arguments(name, env_args, known)
        return BraxEnvironment(factory(**arguments), **wrapping)


class _Numpy:
    """`jax.numpy` for the fluids of Brax's swimmer, which give `clip` an argument that JAX has dropped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: Array, a_min: float) -> Array:
        return jnp.maximum(x, a_min)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the libraries' word on what else could be installed or is deprecated."""
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        yield
