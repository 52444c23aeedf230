"""PureJaxPPO: PPO that never leaves the accelerator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from purejaxppo.config import Config, ConfigError, Hyper, RunOptions, Settings
    from purejaxppo.envs import list_environments, load_settings, make, register
    from purejaxppo.policy import Policy, load_policy
    from purejaxppo.train import make_train, stack_hypers

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "Hyper",
    "Policy",
    "RunOptions",
    "Settings",
    "list_environments",
    "load_policy",
    "load_settings",
    "make",
    "make_train",
    "register",
    "stack_hypers",
]


def __getattr__(name: str) -> Any:
    """A public name or its module, imported when it is asked for: the commands begin without JAX."""
    for home in ("config", "envs", "policy", "train"):
        if name in (home, *__all__):
            module = importlib.import_module(f"purejaxppo.{home}")
            if name == home or hasattr(module, name):
                return getattr(module, name, module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
