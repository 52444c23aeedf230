"""Gymnax: every environment registered there, and any of its style."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from urllib.error import URLError

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from purejaxppo import spaces
from purejaxppo.envs.checks import check_numbers, explained, unpacked
from purejaxppo.types import PyTree, TimeStep
from purejaxppo.values import ConfigError, check_arguments

# Gymnax imports these for drawing only, and they take longer to load than all the rest.
_DRAWING = ("matplotlib", "matplotlib.pyplot", "matplotlib.colors", "seaborn")
_ENVIRONMENTS = "gymnax.environments."  # whose own `step` does what `Vectorized` does


class _Deferred(ModuleType):
    """Stands for a module until something is looked up in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def _import_gymnax() -> Any:
    """The package, imported without what it draws with."""
    if "gymnax" not in sys.modules:
        deferred = {name: _Deferred(name) for name in _DRAWING if name not in sys.modules}
        for name, module in deferred.items():
            parent, _, child = name.rpartition(".")
            if parent in deferred:
                setattr(deferred[parent], child, module)
        sys.modules.update(deferred)
        try:
            importlib.import_module("gymnax")
        finally:
            for name in deferred:
                del sys.modules[name]
    return sys.modules["gymnax"]


class GymnaxEnvironment:
    """A Gymnax environment through its raw `step_env` and `reset_env`, as an `Environment`.

    Args:
        env: in Gymnax's style.
        params: its parameters, the default ones where None.
        binary: observations of zeros and ones, which are kept as booleans.
    """

    def __init__(self, env: Any, params: Any = None, binary: bool = False) -> None:
        self._env = env
        self._binary = binary
        self._params = env.default_params if params is None else params
        observations, actions = _spaces(env, self._params)
        self.observation_space = convert_space(observations)
        self.action_space = convert_space(actions)
        limit = getattr(self._params, "max_steps_in_episode", None)
        self.max_episode_steps = int(limit) if limit is not None and limit % 1 == 0 else limit
        base, own = _import_gymnax().environments.environment.Environment, type(env)
        changed = issubclass(own, base) and not own.step.__module__.startswith(_ENVIRONMENTS)
        if changed or not hasattr(own, "step_env"):
            raise ConfigError(
                f"{own.__name__}: the trainer calls step_env, so what its step does, as that of a wrapper, "
                "would be left out: do it in step_env"
            )
        self.may_truncate = own.is_truncated is not base.is_truncated

    def reset(self, key: Array) -> tuple[PyTree, Array]:
        """(state, obs) of a new episode; consumes key."""
        given = self._env.reset_env(key, self._params)
        obs, state = self._unpacked("reset_env", given, "obs", "state")
        return state, obs

    def step(self, key: Array, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """One raw step; consumes key."""
        given = self._env.step_env(key, state, action, self._params)
        parts = "obs", "state", "reward", "done", "info"
        obs, state, reward, terminated, _ = self._unpacked("step_env", given, *parts)
        # Gymnax's own is the time limit, whose clock is the trainer's.
        truncated = self.may_truncate and self._env.is_truncated(state, self._params)
        return state, TimeStep(obs, reward, terminated, jnp.asarray(truncated))

    def _unpacked(self, method: str, given: Any, *parts: str) -> Sequence[Any]:
        """What a method gives, with obs as an array."""
        name = type(self._env).__name__
        obs, *rest = unpacked(name, method, given, *parts)
        try:
            return jnp.asarray(obs, bool if self._binary else None), *rest
        except (TypeError, ValueError):
            raise ConfigError(
                f"{name}: its {method} gives {type(obs).__name__} first: must be "
                f"({', '.join(parts)}), with one array as obs"
            ) from None


def make(name: str, env_args: dict[str, Any]) -> GymnaxEnvironment:
    """A registered environment. Arguments go to its constructor or its parameters, by their names.

    Raises:
        ConfigError: an argument that neither knows, or data that cannot be downloaded.
    """
    factory = _import_gymnax().registration._registry[name]
    return build(name, factory, env_args, binary=name.endswith("-MinAtar"))


def build(
    name: str, factory: Any, env_args: dict[str, Any], binary: bool = False
) -> GymnaxEnvironment:
    """An environment of Gymnax's style from its class; see `make` and `GymnaxEnvironment`."""
    accepted = set(inspect.signature(factory).parameters)
    try:
        with explained(name, env_args):
            env = factory(**{k: v for k, v in env_args.items() if k in accepted})
    except (URLError, ConnectionError) as error:
        raise ConfigError(f"{name} downloads its data, and that failed: {error}") from None
    params: Any = env.default_params
    if not dataclasses.is_dataclass(type(params)):
        raise ConfigError(f"{name}: its default_params are {params!r}: must be a dataclass")
    defaults = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    check_arguments(name, env_args, accepted | defaults.keys())
    changes = {k: v for k, v in env_args.items() if k not in accepted}
    check_numbers(changes, defaults)
    return GymnaxEnvironment(env, dataclasses.replace(params, **changes), binary)


def _spaces(env: Any, params: Any) -> list[Any]:
    """Of observations and actions, all their bounds from one program: one by one they compile for longer."""

    def make() -> list[Any]:
        return [env.observation_space(params), env.action_space(params)]

    found = []

    def bounds() -> list[dict[str, Array]]:
        found[:] = make()
        return [{k: v for k, v in vars(x).items() if isinstance(v, Array)} for x in found]

    try:
        computed = jax.device_get(jax.jit(bounds)())
    except TypeError:  # of bounds that cannot be traced
        return make()
    for space, arrays in zip(found, computed, strict=True):
        vars(space).update(arrays)
    return found


def convert_space(space: Any) -> spaces.Space:
    """Our space for one of Gymnax's.

    Raises:
        ConfigError: a kind of space that PPO has no head or encoding for.
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return spaces.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(tuple(int(n) for n in space.nvec))
    if kind == "Box":
        shape = (space.shape,) if isinstance(space.shape, int) else tuple(space.shape)
        return spaces.Box(space.low, space.high, shape, np.dtype(space.dtype).name)
    raise ConfigError(f"spaces of the kind {kind} are not supported")
