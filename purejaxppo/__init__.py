"""PureJaxPPO: PPO that never leaves the accelerator."""

__version__ = "0.1.0"
