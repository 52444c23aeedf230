"""PureJaxPPO: PPO that never leaves the accelerator."""

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
