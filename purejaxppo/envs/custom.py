"""Environments of the user's own, by our protocol or in Gymnax's style: imported, built, and checked."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from purejaxppo.envs.base import SPACES, Environment, check_described
from purejaxppo.spaces import Box
from purejaxppo.types import PyTree, TimeStep
from purejaxppo.values import ConfigError

Factory = Callable[..., Any]

# What such an environment must have.
_PROTOCOL = (*SPACES, "max_episode_steps", "may_truncate", "reset", "step")
_GYMNAX_STYLE = (*SPACES, "reset_env", "step_env", "is_truncated")


def make(name: str, factory: Factory | None, arguments: dict[str, Any]) -> Environment:
    """One environment, of a registered factory or of "my_module:MyEnv".

    Raises:
        ConfigError: no such module, an argument it does not know, or it is no environment.
    """
    env = _build(name, factory or _import(name), arguments)
    check(name, env)
    return env


def check(name: str, env: Environment) -> None:
    """Raises ConfigError where an environment is not as the protocol says, or keeps its state for itself."""
    _require(name, env, _PROTOCOL)
    check_described(name, env)
    before = dict(getattr(env, "__dict__", {}))
    _check_what_it_gives(name, env)
    for attribute, value in getattr(env, "__dict__", {}).items():
        if _is_kept(value, before.get(attribute)) and not isinstance(
            getattr(type(env), attribute, None), functools.cached_property
        ):
            raise ConfigError(
                f"{name}: its reset or step changes self.{attribute}, which is compiled in as it is "
                "now: what changes belongs into the state that they give"
            )


def _is_kept(value: Any, before: Any) -> bool:
    """Whether an attribute seems to be state: something traced, or a number that is another now."""
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(value))
    return traced or (isinstance(value, int | float) and value is not before and value != before)


def _import(name: str) -> Factory:
    module_name, _, attribute = name.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module_name) or module_name.endswith(".py"):
        raise ConfigError(f"--env {name}: write my_module:MyEnv, a module's name as in import")
    if os.getcwd() not in sys.path:  # where the console script does not look
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--env {name}: {error}, in this directory or on PYTHONPATH") from None
    except ImportError as error:
        raise ConfigError(f"--env {name}: {error}") from None
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"--env {name}: {module_name} has no {attribute!r}") from None


def _build(name: str, factory: Factory, arguments: dict[str, Any]) -> Environment:
    """An environment of the user's: by our protocol, or of Gymnax's style."""
    if not callable(factory):
        raise ConfigError(f"--env {name}: is {factory!r}, not a class or function that makes one")
    if hasattr(factory, "step_env"):
        from purejaxppo.envs import gymnax

        _require(name, factory, _GYMNAX_STYLE)
        return gymnax.build(name, factory, arguments)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"--env-args: {name}: {error}") from None
    env = factory(**arguments)
    if hasattr(env, "step_env"):
        from purejaxppo.envs import gymnax

        _require(name, env, _GYMNAX_STYLE)
        return gymnax.GymnaxEnvironment(env)
    return env


def _require(name: str, env: Any, attributes: Sequence[str]) -> None:
    """Raises ConfigError for the first attribute that an environment, or its class, has not."""
    for attribute in attributes:
        if not hasattr(env, attribute):
            raise ConfigError(f"--env {name}: it has no {attribute}; see purejaxppo.envs.base")


def _check_what_it_gives(name: str, env: Environment) -> None:
    """Raises ConfigError where `reset` or `step` give something else than the protocol says.

    What they raise themselves is left as it is: who wrote them needs to see where.
    """
    key, space = jax.random.key(0), env.action_space
    state, obs = jax.eval_shape(lambda key: _pair(name, "reset", env.reset(key)), key)
    dtype = jnp.float32 if isinstance(space, Box) else jnp.int32
    action = jax.ShapeDtypeStruct(space.shape, dtype)
    step = functools.partial(_step, name, env)
    after, timestep = jax.eval_shape(step, key, state, action)
    shapes = {"reset's obs": (obs, env.observation_space.shape)}
    shapes |= {
        f"step's {field}": (given, env.observation_space.shape if field == "obs" else ())
        for field, given in vars(timestep).items()
        if given is not None
    }
    for what, (given, shape) in shapes.items():
        if not hasattr(given, "shape"):
            raise ConfigError(f"{name}: its {what} is a {type(given).__name__}: must be one array")
        if given.shape != shape:
            raise ConfigError(
                f"{name}: its {what} has the shape {list(given.shape)}: must be {list(shape)}"
            )
    (begun, old), (stepped, new) = (
        ([list(x.shape) for x in leaves], structure)
        for leaves, structure in map(jax.tree.flatten, (state, after))
    )
    if begun != stepped or old != new:
        raise ConfigError(
            f"{name}: its step gives another state than its reset: arrays {stepped} in {new}, not {begun} in {old}"
        )


def _step(name: str, env: Any, key: Array, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
    after, timestep = _pair(name, "step", env.step(key, state, action))
    if not isinstance(timestep, TimeStep):
        given = type(timestep).__name__
        raise ConfigError(f"{name}: its step gives (state, {given}): must be (state, TimeStep)")
    return after, timestep


def _pair(name: str, method: str, given: Any) -> tuple[Any, Any]:
    if not (isinstance(given, tuple) and len(given) == 2):
        number = f" of {len(given)}" if isinstance(given, tuple) else ""
        second = "obs" if method == "reset" else "TimeStep"
        raise ConfigError(
            f"{name}: its {method} gives a {type(given).__name__}{number}: must be (state, {second})"
        )
    return given
