"""Environments of the user's own, by our protocol or in Gymnax's style: imported and built."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from purejaxppo.envs.base import SPACES, Environment
from purejaxppo.envs.checks import check_environment, require
from purejaxppo.values import ConfigError

Factory = Callable[..., Any]

# What such an environment must have.
_GYMNAX_STYLE = (*SPACES, "reset_env", "step_env", "is_truncated")


def make(name: str, factory: Factory | None, arguments: dict[str, Any]) -> Environment:
    """One environment, of a registered factory or of "my_module:MyEnv".

    Raises:
        ConfigError: no such module, an argument it does not know, or it is no environment.
    """
    env = _build(name, factory or _import(name), arguments)
    check_environment(name, env)
    return env


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

        require(name, factory, _GYMNAX_STYLE)
        return gymnax.build(name, factory, arguments)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"--env-args: {name}: {error}") from None
    return adapted(name, factory(**arguments))


def adapted(name: str, env: Any) -> Environment:
    """An environment as it is, or one of Gymnax's style as ours.

    Raises:
        ConfigError: it is of that style, and lacks something.
    """
    if not hasattr(env, "step_env"):
        return env
    from purejaxppo.envs import gymnax

    require(name, env, _GYMNAX_STYLE)
    return gymnax.GymnaxEnvironment(env)
