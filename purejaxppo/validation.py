"""Which values options may have, alone and together."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from purejaxppo.activations import ACTIVATIONS
from purejaxppo.config import Config, Hyper, RunOptions, Settings, make_settings
from purejaxppo.values import ConfigError, parse_bytes

_LOGS = ("tensorboard", "wandb")
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_MOST_RUNS = 10**6  # each is an object on the host
_FINITE = ("learning_rate", "critic_learning_rate", "reward_scale", "adam_eps", "policy_gain")
_MAY_BE_INFINITE = (
    "reward_clip", "clip_eps", "value_clip_eps", "max_grad_norm", "target_kl", "desired_kl",
)  # fmt: skip


def validate(settings: Settings) -> None:
    """Raises ConfigError for a value out of range or a combination that makes no sense."""
    config, hyper, run = settings.config, settings.hyper, settings.run
    validate_run(run)
    counts = "total_timesteps num_envs num_steps update_epochs num_minibatches microbatch_size"
    _at_least(1, config, f"{counts} pool_size frame_stack gru_units")
    require(min(config.resize or (1,)) >= 1, "resize", config.resize, "sizes of at least 1")
    for name in ("torso_layers", "policy_layers", "value_layers"):
        widths = getattr(config, name)
        require(all(w >= 1 for w in widths or ()), name, widths, "widths of at least 1")
    for layer in config.cnn_layers or ():
        require(min(layer) >= 1, "cnn_layers", layer, "features, kernel and stride of at least 1")
    known = f"one of {', '.join(ACTIVATIONS)}"
    require(config.activation in (None, *ACTIVATIONS), "activation", config.activation, known)
    validate_hyper(hyper)
    _validate_together(config, hyper, run)


def validate_hyper(hyper: Hyper) -> None:
    """Raises ConfigError for a value out of range."""
    for name in ("gamma", "gae_lambda"):
        require(0 <= getattr(hyper, name) <= 1, name, getattr(hyper, name), "in 0 ... 1")
    for name in ("ent_coef", "vf_coef"):
        value = getattr(hyper, name)
        require(0 <= value < math.inf, name, value, "at least 0")
    require(math.isfinite(hyper.init_log_std), "init_log_std", hyper.init_log_std, "finite")
    for name in (*_FINITE, *_MAY_BE_INFINITE):
        value = getattr(hyper, name)
        require(value is None or value >= _TINY, name, value, "above 0 in float32")
        most = _HUGE if name in _FINITE else math.inf
        require(value is None or value <= most, name, value, "finite in float32")


def validated(config: Config) -> Config:
    """A configuration made in Python: every value of its option's type, and what `validate` checks."""
    settings = make_settings(vars(config))
    validate(settings)
    return settings.config


def validate_run(run: RunOptions) -> None:
    """Raises ConfigError for a value out of range."""
    _at_least(0, run, "seed eval_episodes eval_every metrics_rows checkpoint_every keep")
    _at_least(1, run, "runs_per_block samples checkpoint_iterations video_every")
    block = run.runs_per_block
    require(
        block == "auto" or block <= _MOST_RUNS, "runs_per_block", block, f"at most {_MOST_RUNS}"
    )
    for name in run.log:
        require(name in _LOGS, "log", name, f"one of {', '.join(_LOGS)}")
    require(1 <= run.num_seeds <= _MOST_RUNS, "num_seeds", run.num_seeds, f"in 1 ... {_MOST_RUNS}")
    most = 2**32 - run.num_seeds
    require(run.seed <= most, "seed", run.seed, f"at most 2**32 - --num-seeds, {most}")
    if run.memory_limit is not None:
        try:
            parse_bytes(run.memory_limit)
        except ValueError:
            require(False, "memory_limit", run.memory_limit, "a size such as 8GiB")
    if not run.keep and (run.checkpoint_iterations or run.resume):
        name = "resume" if run.resume else "checkpoint-iterations"
        raise ConfigError(f"--{name}: there are no checkpoints with --keep 0")
    if run.resume and run.run_dir:
        raise ConfigError(f"--run-dir {run.run_dir}: --resume goes on in {run.resume}")
    _validate_processes(run)


def _validate_processes(run: RunOptions) -> None:
    """Raises ConfigError unless the processes are all given, or left to the cluster."""
    given = {n: getattr(run, n) for n in ("coordinator", "num_processes", "process_id")}
    named = {f"--{n.replace('_', '-')}": v for n, v in given.items() if v is not None}
    if named and not run.distributed:
        raise ConfigError(f"{next(iter(named))}: only with --distributed")
    if named and len(named) < len(given):
        raise ConfigError(
            f"{', '.join(named)}: all of --coordinator, --num-processes, --process-id"
        )
    if run.coordinator is not None and not re.fullmatch(r".+:[0-9]+", run.coordinator):
        require(False, "coordinator", run.coordinator, "host:port")
    if run.num_processes is not None and run.process_id is not None:
        require(run.num_processes >= 1, "num_processes", run.num_processes, "at least 1")
        allowed = f"in 0 ... {run.num_processes - 1}"
        require(0 <= run.process_id < run.num_processes, "process_id", run.process_id, allowed)


def _validate_together(config: Config, hyper: Hyper, run: RunOptions) -> None:
    """Raises ConfigError for options, each in its range, that do not go together."""
    if config.batch_size % config.num_minibatches:
        raise ConfigError(
            f"--num-envs {config.num_envs} * --num-steps {config.num_steps} = {config.batch_size} "
            f"is not divisible by --num-minibatches {config.num_minibatches}"
        )
    of_one = {"minibatch": config.num_minibatches, "batch": 1, "off": 0}
    if config.batch_size == of_one[config.normalize_advantages]:
        instead = "off" if config.batch_size == 1 else "batch"
        raise ConfigError(
            f"--num-minibatches {config.num_minibatches}: a {config.normalize_advantages} of one sample has no "
            f"advantage over itself; add --normalize-advantages {instead}"
        )
    if config.in_sequences:
        _validate_sequences(config)
    if config.normalize_rewards and hyper.reward_scale != Hyper.reward_scale:
        raise ConfigError(
            f"--reward-scale {hyper.reward_scale}: --normalize-rewards scales rewards already"
        )
    backend = dict(config.env_args).get("backend")
    if config.backend is not None and backend not in (None, config.backend):
        raise ConfigError(
            f"--env-args backend={backend}: the backend is {config.backend}; --backend sets it"
        )
    validate_desired_kl(config, hyper)
    if config.log_std == "state" and not -20 < hyper.init_log_std < 2:
        raise ConfigError(
            f"--init-log-std {hyper.init_log_std}: a --log-std that depends on the state lies in -20 ... 2"
        )
    if config.reset_mode == "fresh" and config.pool_size != Config.pool_size:
        raise ConfigError(
            f"--pool-size {config.pool_size}: there is no pool with --reset-mode fresh"
        )
    if run.eval_every is not None and not run.eval_episodes:
        raise ConfigError(
            f"--eval-every {run.eval_every}: there are no --eval-episodes; add --eval-every none"
        )


def _validate_sequences(config: Config) -> None:
    """Raises ConfigError for options that do not go with minibatches of sequences, or with a memory."""
    memory = f"--gru-units {config.gru_units}"
    if config.num_envs % config.num_minibatches:
        raise ConfigError(
            f"--num-envs {config.num_envs} is not divisible by --num-minibatches {config.num_minibatches}, "
            f"as {memory if config.gru_units else '--minibatches sequences'} needs"
        )
    if (config.microbatch_size or config.num_steps) < config.num_steps:
        raise ConfigError(
            f"--microbatch-size {config.microbatch_size}: sequences are whole, of --num-steps "
            f"{config.num_steps}; give at least that"
        )
    if config.gru_units is None:
        return
    if config.minibatches == "samples":
        raise ConfigError(f"--minibatches samples: {memory} needs sequences; or --gru-units none")
    if config.shared_torso is False:
        raise ConfigError(
            f"--no-shared-torso: policy and value share the memory of {memory}; or --gru-units none"
        )
    if config.recompute_advantages:
        raise ConfigError(
            f"--recompute-advantages: the memory of {memory} is not taken anew; "
            "add --no-recompute-advantages, or --gru-units none"
        )


def validate_desired_kl(config: Config, hyper: Hyper) -> None:
    """Raises ConfigError where it does not go with other options, whatever their values, traced or not."""
    if hyper.desired_kl is not None and config.anneal_learning_rate:
        raise ConfigError(
            "--desired-kl and --anneal-learning-rate both set the learning rate: "
            "add --no-anneal-learning-rate"
        )
    if hyper.desired_kl is not None and hyper.target_kl is not None:
        raise ConfigError(
            "--target-kl ends an iteration before --desired-kl can slow it down: give one of them"
        )


def _at_least(least: int, options: Any, names: str) -> None:
    """Raises ConfigError for the first of these that is less; not for what is left open."""
    for name in names.split():
        value = getattr(options, name)
        require(value in (None, "auto") or value >= least, name, value, f"at least {least}")


def require(holds: bool, name: str, value: Any, allowed: str) -> None:
    """Raises ConfigError, for the value of an option, unless it holds."""
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: must be {allowed}")
