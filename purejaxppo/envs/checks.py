"""What is checked of an environment before it is trained: what it says of itself, and what it gives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from purejaxppo.envs.base import SPACES, Described, Environment
from purejaxppo.spaces import Box, Space
from purejaxppo.types import PyTree, TimeStep
from purejaxppo.values import ConfigError

_PROTOCOL = (*SPACES, "max_episode_steps", "may_truncate", "reset", "step")


def check_environment(name: str, env: Environment) -> None:
    """Raises ConfigError where an environment is not as the protocol says, or keeps its state for itself."""
    require(name, env, _PROTOCOL)
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


@contextlib.contextmanager
def explained(name: str, arguments: Collection[str]) -> Iterator[None]:
    """Has ConfigError say in one line why an environment cannot be made with these arguments."""
    try:
        yield
    except ConfigError:
        raise
    except (
        ValueError, TypeError, AssertionError, AttributeError, LookupError, ArithmeticError, NotImplementedError,
    ) as error:  # fmt: skip
        if not arguments:  # it is something else
            raise
        reason = (str(error) or f"refused by {type(error).__name__}").splitlines()[0]
        raise ConfigError(f"--env-args of {name}: {reason}") from None


def check_positive(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError unless all are whole numbers of at least 1."""
    for argument, value in arguments.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"--env-args {argument}={value}: must be a whole number, at least 1")


def check_numbers(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that is no number where its default is one."""
    for argument, value in arguments.items():
        if _is_number(defaults.get(argument)) and not _is_number(value):
            raise ConfigError(f"--env-args {argument}={value}: must be a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_kept(value: Any, before: Any) -> bool:
    """Whether an attribute seems to be state: something traced, or a number that is another now."""
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(value))
    return traced or (isinstance(value, int | float) and value is not before and value != before)


def require(name: str, env: Any, attributes: Sequence[str]) -> None:
    """Raises ConfigError for the first attribute that an environment, or its class, has not."""
    for attribute in attributes:
        if not hasattr(env, attribute):
            raise ConfigError(f"--env {name}: it has no {attribute}; see purejaxppo.envs.base")


def check_described(name: str, env: Described) -> None:
    """Raises ConfigError where what an environment says of itself cannot be used."""
    for attribute in SPACES:
        space = getattr(env, attribute)
        if not isinstance(space, Space):
            raise ConfigError(f"{name}: its {attribute} is {space!r}, none of purejaxppo.spaces")
        if isinstance(space, Box) and not np.less_equal(*space.bounds).all():
            raise ConfigError(
                f"{name}: its {attribute} is {space}, with a lower bound above the upper"
            )
    limit = env.max_episode_steps
    whole = isinstance(limit, int | np.integer) and not isinstance(limit, bool)
    if limit is not None and not (whole and 1 <= limit < 2**31):  # the clock is an int32
        raise ConfigError(
            f"{name}: its max_episode_steps is {limit!r}: must be a whole number in 1 ... 2**31 - 1, or None"
        )


def _check_what_it_gives(name: str, env: Environment) -> None:
    """Raises ConfigError where `reset` or `step` give something else than the protocol says.

    What they raise themselves is left as it is: who wrote them needs to see where.
    """
    key, space = jax.random.key(0), env.action_space
    state, obs = jax.eval_shape(
        lambda key: unpacked(name, "reset", env.reset(key), "state", "obs"), key
    )
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
    after, timestep = unpacked(name, "step", env.step(key, state, action), "state", "TimeStep")
    if not isinstance(timestep, TimeStep):
        given = type(timestep).__name__
        raise ConfigError(f"{name}: its step gives (state, {given}): must be (state, TimeStep)")
    return after, timestep


def unpacked(name: str, method: str, given: Any, *parts: str) -> Sequence[Any]:
    """What a method gives; raises ConfigError unless it is a tuple of so many parts."""
    if not (isinstance(given, tuple) and len(given) == len(parts)):
        number = f" of {len(given)}" if isinstance(given, tuple) else ""
        raise ConfigError(
            f"{name}: its {method} gives a {type(given).__name__}{number}: must be ({', '.join(parts)})"
        )
    return given
