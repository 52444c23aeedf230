"""PureJaxPPO: PPO that never leaves the accelerator."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from purejaxppo.config import Config, ConfigError, Hyper, RunOptions, Settings
    from purejaxppo.envs import list_environments, load_settings, make, register
    from purejaxppo.policy import Policy, act, load_policy
    from purejaxppo.train import make_setup, make_train, stack_hypers

__version__ = "0.2.0"

started = time.time()  # before another module is read

__all__ = [
    "Config",
    "ConfigError",
    "Hyper",
    "Policy",
    "RunOptions",
    "Settings",
    "act",
    "list_environments",
    "load_policy",
    "load_settings",
    "make",
    "make_setup",
    "make_train",
    "register",
    "stack_hypers",
]
_HOMES = ("config", "envs", "policy", "train")


def __getattr__(name: str) -> Any:
    """A public name or a module, imported when it is asked for: the commands begin without JAX."""
    if name in __all__:
        homes = (importlib.import_module(f"purejaxppo.{home}") for home in _HOMES)
        return next(getattr(home, name) for home in homes if hasattr(home, name))
    if importlib.util.find_spec(f"purejaxppo.{name}"):
        return importlib.import_module(f"purejaxppo.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
