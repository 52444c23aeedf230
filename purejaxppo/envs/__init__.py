"""Environments by name: `make`, `register`, `list_environments`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purejaxppo.config import Config, Settings, read_settings
from purejaxppo.envs.base import Environment, VectorEnvironment, Vectorized
from purejaxppo.envs.images import prepare_images
from purejaxppo.spaces import Space
from purejaxppo.values import ConfigError, suggest

Factory = Callable[..., Any]

_GYMNAX = [
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Asterix-MinAtar",
    "Breakout-MinAtar",
    "Freeway-MinAtar",
    "Seaquest-MinAtar",
    "SpaceInvaders-MinAtar",
    "Catch-bsuite",
    "DeepSea-bsuite",
    "MemoryChain-bsuite",
    "UmbrellaChain-bsuite",
    "DiscountingChain-bsuite",
    "MNISTBandit-bsuite",
    "SimpleBandit-bsuite",
    "FourRooms-misc",
    "MetaMaze-misc",
    "PointRobot-misc",
    "BernoulliBandit-misc",
    "GaussianBandit-misc",
    "Reacher-misc",
    "Swimmer-misc",
    "Pong-misc",
    "FrozenLake-misc",
]

_BRAX = [
    "ant",
    "halfcheetah",
    "hopper",
    "humanoid",
    "humanoidstandup",
    "inverted_pendulum",
    "inverted_double_pendulum",
    "pusher",
    "reacher",
    "swimmer",
    "walker2d",
]

_PLAYGROUND = [  # its dm_control suite, which needs no download
    "AcrobotSwingup",
    "AcrobotSwingupSparse",
    "BallInCup",
    "CartpoleBalance",
    "CartpoleBalanceSparse",
    "CartpoleSwingup",
    "CartpoleSwingupSparse",
    "CheetahRun",
    "FingerSpin",
    "FingerTurnEasy",
    "FingerTurnHard",
    "FishSwim",
    "HopperHop",
    "HopperStand",
    "HumanoidStand",
    "HumanoidWalk",
    "HumanoidRun",
    "PendulumSwingup",
    "PointMass",
    "ReacherEasy",
    "ReacherHard",
    "SwimmerSwimmer6",
    "WalkerRun",
    "WalkerStand",
    "WalkerWalk",
]

_OCTAX = [
    "airplane",
    "blinky",
    "brix",
    "deep",
    "filter",
    "flight_runner",
    "missile",
    "pong",
    "rocket",
    "shooting_stars",
    "spacejam",
    "squash",
    "submarine",
    "tank",
    "tetris",
    "ufo",
    "vertical_brix",
    "wipe_off",
    "worm",
    *(f"cavern{level}" for level in (1, 2, 3, 5, 6)),
    *(f"space_flight{level}" for level in range(1, 11)),
    *(f"target_shooter{level}" for level in (1, 2, 3)),
]

# Host memory that an environment outside of the program takes: what the hungriest, Atari's, do.
EXTERNAL_BYTES = 2 * 2**20

# Suites that know more names than are listed here.
_OPEN_SUITES = ("playground", "envpool")

# What an environment of the user's must have: by our protocol, or in Gymnax's style.
_SPACES = ("observation_space", "action_space")
_PROTOCOL = (*_SPACES, "max_episode_steps", "may_truncate", "reset", "step")
_GYMNAX_STYLE = (*_SPACES, "reset_env", "step_env", "is_truncated")

# Name -> the suite's module, imported when one of its environments is asked for, or a factory.
_REGISTRY: dict[str, str | Factory] = {
    **dict.fromkeys(_GYMNAX, "purejaxppo.envs.gymnax"),
    **dict.fromkeys((f"brax/{name}" for name in _BRAX), "purejaxppo.envs.brax"),
    **dict.fromkeys((f"octax/{name}" for name in _OCTAX), "purejaxppo.envs.octax"),
    **dict.fromkeys((f"playground/{name}" for name in _PLAYGROUND), "purejaxppo.envs.playground"),
}


def list_environments() -> list[str]:
    """The names of all environments."""
    return list(_REGISTRY)


def full_name(name: str) -> str:
    """The registered name that is meant: `ant` is `brax/ant`, where only one suite has an ant."""
    if name in _REGISTRY:
        return name
    found = [known for known in _REGISTRY if known.rpartition("/")[2] == name]
    return found[0] if len(found) == 1 else name


def load_settings(
    env: str | None = None, file: str | Path | None = None, backend: str | None = None
) -> Settings:
    """Settings of a YAML file, or the shipped ones of an environment, over the defaults.

    Args:
        env: any of its names, as `ant` or `brax/ant`; over that of the file.
        backend: what an environment with several kinds of physics runs on.

    Raises:
        ConfigError: there is no such environment, or the file cannot be read, or says something that is
            no option or value.
    """
    if env is not None:
        env = full_name(env)
        _require_known(env)
    settings = read_settings(env, file, backend)
    named = full_name(settings.config.env)  # which a file may have in short, too
    return dataclasses.replace(settings, config=dataclasses.replace(settings.config, env=named))


def _require_known(name: str) -> None:
    """Raises ConfigError for what is neither registered, nor in an open suite, nor a module's."""
    if name not in _REGISTRY and name.partition("/")[0] not in _OPEN_SUITES and ":" not in name:
        raise ConfigError(
            f"unknown environment {name!r}{suggest(name, _REGISTRY, most=3)} "
            "(`purejaxppo envs` lists all; your own: --env my_module:MyEnv)"
        )


def register(name: str, factory: Factory) -> None:
    """Makes an environment available as `--env name`.

    Args:
        factory: called with `--env-args`; returns an `Environment` or one of Gymnax's style.

    Raises:
        ValueError: the name is taken.
    """
    if name in _REGISTRY:
        raise ValueError(f"environment {name!r} is already registered")
    _REGISTRY[name] = factory


def make(name: str, env_args: Mapping[str, Any] | None = None) -> Environment:
    """One environment, from a registered name or "my_module:MyEnv".

    Raises:
        ConfigError: an unknown name, module or argument.
    """
    arguments, name = dict(env_args or {}), full_name(name)
    _require_known(name)
    entry = _REGISTRY.get(name)
    suite = name.partition("/")[0]
    if entry is None and suite in _OPEN_SUITES:
        entry = f"purejaxppo.envs.{suite}"
    if isinstance(entry, str):
        env = importlib.import_module(entry).make(name, arguments)
    else:
        env = _build(name, entry or _import(name), arguments)
    _check(name, env)
    return env


def _check(name: str, env: Environment) -> None:
    """Raises ConfigError where what an environment says of itself cannot be used."""
    for attribute in _SPACES:
        space = getattr(env, attribute)
        if not isinstance(space, Space):
            raise ConfigError(f"{name}: its {attribute} is {space!r}, none of purejaxppo.spaces")
    limit = env.max_episode_steps
    if limit is not None and not (isinstance(limit, int | np.integer) and limit >= 1):
        raise ConfigError(
            f"{name}: its max_episode_steps is {limit!r}: must be a whole number, at least 1, or None"
        )


def has_vectors(name: str) -> bool:
    """Whether an environment is known to observe no images, without making it."""
    name = full_name(name)
    if not isinstance(_REGISTRY.get(name), str) or name.startswith("octax/"):
        return False
    return not name.endswith(("-MinAtar", "Pong-misc"))


def is_external(env: Any) -> bool:
    """Whether an environment lives outside of the compiled program; see `VectorEnvironment`."""
    return getattr(env, "external", False)


def vectorize(
    config: Config, env: Any, episodes: int | None = None, seeds: Sequence[int] = (0,)
) -> VectorEnvironment:
    """Copies of an environment, with observations as the configuration wants them.

    Args:
        env: from `make`.
        episodes: how many, for an evaluation of as many episodes; as the training has, if not given.
        seeds: of the runs that it will be vmapped over, for environments outside of the program.

    Raises:
        ConfigError: the configuration wants of observations what they are not.
    """
    if is_external(env):
        use = int(episodes is not None)  # so that an evaluation is not of what was trained on
        vector = dataclasses.replace(
            env,
            num_envs=episodes or config.num_envs,
            seeds=tuple(np.random.SeedSequence([seed, use]) for seed in seeds),
        )
    elif episodes is None:
        vector = Vectorized(env, config.num_envs, config.reset_mode, config.pool_size)
    else:
        vector = Vectorized(env, episodes)
    return prepare_images(config, vector)


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
    _require(name, env, _PROTOCOL)
    return env


def _require(name: str, env: Any, attributes: Sequence[str]) -> None:
    """Raises ConfigError for the first attribute that an environment, or its class, has not."""
    for attribute in attributes:
        if not hasattr(env, attribute):
            raise ConfigError(f"--env {name}: it has no {attribute}; see purejaxppo.envs.base")
