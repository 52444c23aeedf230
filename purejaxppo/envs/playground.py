"""MuJoCo Playground (the extra `playground`), whose environments have Brax's style."""

from __future__ import annotations

import subprocess
from typing import Any

from purejaxppo.envs.brax import BraxEnvironment, quietly
from purejaxppo.envs.checks import check_positive
from purejaxppo.values import ConfigError, check_arguments, suggest


def make(name: str, env_args: dict[str, Any]) -> BraxEnvironment:
    """The environment `playground/<name>`, by MuJoCo in JAX (`impl: jax`).

    Args:
        env_args: entries of Playground's own configuration, episode_length and action_repeat among
            them.

    Raises:
        ConfigError: the package is not installed, an argument that the configuration does not have,
            or assets that cannot be downloaded.
    """
    short = name.removeprefix("playground/")
    with quietly():
        try:
            from mujoco_playground import registry  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError(
                f"{name} needs MuJoCo Playground: pip install 'purejaxppo[playground]'"
            ) from None
        if short not in registry.ALL_ENVS:
            raise ConfigError(
                f"unknown environment {name!r}{suggest(short, registry.ALL_ENVS, most=3)}"
            )
        config = registry.get_default_config(short)
        check_arguments(name, env_args, config)
        wrapping = {k: env_args.get(k, config[k]) for k in ("episode_length", "action_repeat")}
        check_positive(wrapping)
        try:
            env = registry.load(short, config_overrides={"impl": "jax"} | env_args)
        except (subprocess.CalledProcessError, OSError) as error:
            raise ConfigError(f"{name} downloads its assets, and that failed: {error}") from None
        # Some keep a history in their observations (BarkourJoystick, Op3Joystick).
        return BraxEnvironment(env, **wrapping, reads_obs=True)
