"""Environments by name: `make`, `register`, `list_environments`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.core import eval_context

from purejaxppo.config import Config, Settings, read_settings
from purejaxppo.envs import custom
from purejaxppo.envs.base import Environment, VectorEnvironment, Vectorized
from purejaxppo.envs.checks import check_described, check_environment, explained
from purejaxppo.envs.custom import Factory
from purejaxppo.envs.images import prepare_images
from purejaxppo.values import ConfigError, suggest

# What each suite has; of Playground's its dm_control suite, which needs no download. The names of all but
# Gymnax's begin with the suite's.
_SUITES = {
    "gymnax": """
        CartPole-v1 Pendulum-v1 Acrobot-v1 MountainCar-v0 MountainCarContinuous-v0
        Asterix-MinAtar Breakout-MinAtar Freeway-MinAtar Seaquest-MinAtar SpaceInvaders-MinAtar
        Catch-bsuite DeepSea-bsuite MemoryChain-bsuite UmbrellaChain-bsuite
        DiscountingChain-bsuite MNISTBandit-bsuite SimpleBandit-bsuite FourRooms-misc
        MetaMaze-misc PointRobot-misc BernoulliBandit-misc GaussianBandit-misc Reacher-misc
        Swimmer-misc Pong-misc FrozenLake-misc
    """,
    "brax": """
        ant halfcheetah hopper humanoid humanoidstandup inverted_pendulum
        inverted_double_pendulum pusher reacher swimmer walker2d
    """,
    "craftax": """
        Craftax-Classic-Symbolic-v1 Craftax-Classic-Pixels-v1 Craftax-Symbolic-v1 Craftax-Pixels-v1
    """,
    "octax": """
        airplane blinky brix deep filter flight_runner missile pong rocket shooting_stars
        spacejam squash submarine tank tetris ufo vertical_brix wipe_off worm cavern1 cavern2
        cavern3 cavern5 cavern6 space_flight1 space_flight2 space_flight3 space_flight4
        space_flight5 space_flight6 space_flight7 space_flight8 space_flight9 space_flight10
        target_shooter1 target_shooter2 target_shooter3
    """,
    "playground": """
        AcrobotSwingup AcrobotSwingupSparse BallInCup CartpoleBalance CartpoleBalanceSparse
        CartpoleSwingup CartpoleSwingupSparse CheetahRun FingerSpin FingerTurnEasy
        FingerTurnHard FishSwim HopperHop HopperStand HumanoidStand HumanoidWalk HumanoidRun
        PendulumSwingup PointMass ReacherEasy ReacherHard SwimmerSwimmer6 WalkerRun WalkerStand
        WalkerWalk
    """,
    "xminigrid": """
        MiniGrid-BlockedUnlockPickUp MiniGrid-DoorKey-5x5 MiniGrid-DoorKey-6x6 MiniGrid-DoorKey-8x8
        MiniGrid-DoorKey-16x16 MiniGrid-Empty-5x5 MiniGrid-Empty-6x6 MiniGrid-Empty-8x8
        MiniGrid-Empty-16x16 MiniGrid-EmptyRandom-5x5 MiniGrid-EmptyRandom-6x6
        MiniGrid-EmptyRandom-8x8 MiniGrid-EmptyRandom-16x16 MiniGrid-FourRooms MiniGrid-LockedRoom
        MiniGrid-MemoryS8 MiniGrid-MemoryS16 MiniGrid-MemoryS32 MiniGrid-MemoryS64 MiniGrid-MemoryS128
        MiniGrid-Playground MiniGrid-Unlock MiniGrid-UnlockPickUp
    """,
}

# Suites that know more names than are listed here.
_OPEN_SUITES = ("playground", "envpool")

# Name -> the suite's module, imported when one of its environments is asked for, or a factory.
_REGISTRY: dict[str, str | Factory] = {
    name if suite == "gymnax" else f"{suite}/{name}": f"purejaxppo.envs.{suite}"
    for suite, names in _SUITES.items()
    for name in names.split()
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
    with eval_context():  # what is computed here is known, within `jit` too
        if not isinstance(entry, str):
            return custom.make(name, entry, arguments)
        changed = arguments.keys() - {"backend"}  # from what is shipped, and may not work
        with explained(name, changed):
            env = importlib.import_module(entry).make(name, arguments)
            whole = changed and not is_external(env)
            (check_environment if whole else check_described)(name, env)
            return env


def is_shipped(name: str) -> bool:
    """Whether an environment is one of a suite's, and not the user's own."""
    name = full_name(name)
    open_suite = name.partition("/")[0] in _OPEN_SUITES
    return isinstance(_REGISTRY.get(name, "" if open_suite else None), str)


def has_vectors(name: str) -> bool:
    """Whether an environment is known to observe no images, without making it."""
    name = full_name(name)
    if not isinstance(_REGISTRY.get(name), str) or name.startswith(("octax/", "xminigrid/")):
        return False
    return not name.endswith(("-MinAtar", "Pong-misc", "-Pixels-v1"))


def is_external(env: Any) -> bool:
    """Whether an environment lives outside of the compiled program; see `VectorEnvironment`."""
    return getattr(env, "external", False)


def vectorize(
    config: Config,
    env: Any,
    episodes: int | None = None,
    seeds: Sequence[int] = (0,),
    begun: int = 0,
) -> VectorEnvironment:
    """Copies of an environment, with observations as the configuration wants them.

    Args:
        env: from `make`.
        episodes: how many, for an evaluation of as many episodes; as the training has, if not given.
        seeds: of the runs that it will be vmapped over, for environments outside of the program.
        begun: the iteration that those go on from: with other episodes than the first ones again.

    Raises:
        ConfigError: the configuration wants of observations what they are not.
    """
    if is_external(env):
        use = int(episodes is not None)  # so that an evaluation is not of what was trained on
        vector = dataclasses.replace(
            env,
            num_envs=episodes or config.num_envs,
            seeds=tuple(np.random.SeedSequence([seed, use, begun]) for seed in seeds),
        )
    elif episodes is None:
        reached = min(config.pool_size, config.num_steps)
        vector = Vectorized(env, config.num_envs, reached if config.reset_mode == "pool" else 0)
    else:
        vector = Vectorized(env, episodes)
    return prepare_images(config, vector)
