"""What a training is: `Config` decides what compiles, `Hyper` is traced, `RunOptions` is the rest.

The type of an option says what can be swept in one compiled program: every field of `Hyper`, and
the seed. All three are written to and read from one flat YAML file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from flax import struct

from purejaxppo.networks import ACTIVATIONS, CNN_LAYERS, CnnLayers

_LOGS = ("tensorboard", "wandb")
EnvArgs = tuple[tuple[str, Any], ...]


class ConfigError(ValueError):
    """An option that cannot be used. Its message is one line that a user can act on."""


@dataclass(frozen=True)
class Config:
    """Algorithm, environment and network: static, so changing one compiles anew."""

    env: str = "CartPole-v1"
    """Environment to train: a name that `purejaxppo envs` lists, or my_module:MyEnv."""
    env_args: EnvArgs = ()
    """Arguments of the environment's factory, as name=value ..."""
    backend: str | None = None
    """Physics of a Brax environment: spring, positional, generalized or mjx."""
    grayscale: bool = False
    """Images in grey, not in red, green and blue."""
    resize: tuple[int, int] | None = None
    """Height and width that images are brought to."""
    frame_stack: int = 1
    """Images that make an observation: the last ones of the episode, as channels."""
    total_timesteps: int = 1_000_000
    """Environment steps of each run, rounded up to whole iterations."""
    num_envs: int = 16
    """Environments stepped side by side."""
    num_steps: int = 128
    """Steps of each environment in a rollout."""
    update_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches in a pass; num_envs * num_steps must be a multiple."""
    microbatch_size: int | None = None
    """Most samples of a minibatch whose gradients are computed at a time, and then averaged, in equal
    parts: takes less memory. By default all, or on a CPU as many as fit its cache where there are convolutions."""
    minibatches: Literal["samples", "sequences"] = "samples"
    """Minibatches of single samples, or of whole rollouts of some of the environments."""
    cnn_layers: CnnLayers | None = None
    """Convolutions, features x kernel x stride of each, or nature, minatar, flat (for none). By
    default those that fit the observations."""
    torso_layers: tuple[int, ...] | None = None
    """Widths of the dense layers before policy and value part; by default 64,64, and after
    convolutions 512 or, of small images, 128."""
    policy_layers: tuple[int, ...] = ()
    """Widths of further layers of the policy."""
    value_layers: tuple[int, ...] = ()
    """Widths of further layers of the value function."""
    shared_torso: bool | None = None
    """One torso for policy and value instead of one each; by default with convolutions alone."""
    activation: str | None = None
    """Activation function: tanh, relu, swish, gelu or elu; by default tanh, with convolutions relu."""
    convolution: Literal["auto", "patches", "xla"] = "auto"
    """How a convolution is computed: by a product of patches, as on a CPU by default, or by XLA's."""
    action_distribution: Literal["auto", "categorical", "gaussian", "tanh_gaussian"] = "auto"
    """auto: categorical for discrete actions, gaussian (clipped to the bounds) for a Box."""
    log_std: Literal["parameter", "state"] = "parameter"
    """Gaussian log standard deviation: a parameter, or an output that depends on the state."""
    normalize_observations: bool = False
    """Normalise observations by their running mean and standard deviation."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    normalize_advantages: Literal["minibatch", "batch", "off"] = "minibatch"
    """Over what advantages are brought to mean 0 and standard deviation 1."""
    anneal_learning_rate: bool = True
    """Lower the learning rates linearly to 0 over the training."""
    anneal_clip_eps: bool = False
    """Lower clip_eps and value_clip_eps linearly to 0."""
    anneal_ent_coef: bool = False
    """Lower ent_coef linearly to 0."""
    reset_mode: Literal["pool", "fresh"] = "pool"
    """fresh: a new start state at every reset; pool: from a pool drawn for each rollout."""
    pool_size: int = 8
    """Start states an environment has in a rollout's pool; it repeats one only after so many."""

    @property
    def env_options(self) -> dict[str, Any]:
        """All that the environment's factory is given."""
        return dict(self.env_args) | ({"backend": self.backend} if self.backend else {})

    @property
    def batch_size(self) -> int:
        """Samples of one iteration, T * N."""
        return self.num_steps * self.num_envs

    @property
    def iterations(self) -> int:
        """Iterations that reach total_timesteps, rounded up."""
        return -(-self.total_timesteps // self.batch_size)


class Hyper(struct.PyTreeNode):
    """Hyperparameters: traced, so runs that differ in them share one compiled program."""

    learning_rate: float = 2.5e-4
    """Adam's step size."""
    critic_learning_rate: float | None = None
    """Step size of the value network, where it has an optimiser of its own."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation; 1 is Monte Carlo."""
    clip_eps: float = 0.2
    """Clip range of the probability ratio."""
    value_clip_eps: float | None = None
    """Clip range of the value function; not clipped when not given."""
    reward_scale: float = 1.0
    """What rewards are multiplied by for learning; scores stay as they are."""
    reward_clip: float | None = None
    """Rewards are clipped to this for learning, up and down; scores stay as they are."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss, which is half the mean squared error."""
    max_grad_norm: float = 0.5
    """Gradients are clipped to this global norm."""
    adam_eps: float = 1e-5
    """Adam's epsilon."""
    policy_gain: float = 0.01
    """Gain of the policy head's initial weights."""
    init_log_std: float = 0.0
    """Initial log standard deviation of Gaussian actions (1 is half the width of the bounds)."""
    target_kl: float | None = None
    """Skip the remaining updates of an iteration once approx_kl exceeds this."""
    desired_kl: float | None = None
    """Adapt the learning rates, between 1e-5 and 1e-2, to keep approx_kl near this."""


@dataclass(frozen=True)
class RunOptions:
    """Seeds, evaluation and output."""

    seed: int = 0
    """First seed of every setting; the others follow it."""
    num_seeds: int = 1
    """Runs of every setting, one seed each."""
    eval_every: int | None = None
    """Environment steps between evaluations, 0 for one at the end; 20 in a training by default."""
    eval_sampled: bool = False
    """Evaluate with sampled actions instead of the most likely ones."""
    eval_episodes: int = 128
    """Episodes of an evaluation; 0 for none."""
    video_every: int | None = None
    """Environment steps between videos of a run's policy, in videos/; none when not given."""
    log: tuple[str, ...] = ()
    """Where curves and videos go beside the run directory: tensorboard, wandb."""
    metrics_rows: int = 1000
    """Most rows a run has in metrics.csv, 0 for one an iteration."""
    run_dir: str | None = None
    """Directory for the results; made up from environment and time when not given."""
    resume: str | None = None
    """Run directory to go on with. What is trained cannot change but for --total-timesteps."""
    any_version: bool = False
    """Go on with a checkpoint that other versions of the packages made: not bit for bit."""
    checkpoint_every: int = 60
    """Seconds between checkpoints, beside the one at the end; 0 for that one alone."""
    checkpoint_iterations: int | None = None
    """Iterations between checkpoints, instead of seconds."""
    keep: int = 2
    """Latest checkpoints that are kept; 0 for none at all."""
    runs_per_block: Literal["auto"] | int = "auto"
    """Runs vmapped together on a device at a time. auto: 4 on a CPU and all on an accelerator, or as
    many as there is memory for."""
    memory_limit: str | None = None
    """Memory to stay below, as 8GiB: of each accelerator, or of a process that runs on CPUs. By
    default what is free."""
    shard: Literal["runs", "environments"] = "runs"
    """What devices divide: runs, or the environments of each run."""
    distributed: bool = False
    """Several processes, which find each other by the cluster's environment or by the next three."""
    coordinator: str | None = None
    """Address of process 0, as host:port."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    sweep: tuple[str, ...] = ()
    """What runs differ in beside the seed: name=value,value or name~loguniform(low,high)."""
    samples: int | None = None
    """Random samples of what is swept over a range."""
    deterministic: bool = False
    """Ask XLA for deterministic operations on a GPU, where this has never been run; CPUs need none."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache directory, so that a second run starts fast."""


@dataclass(frozen=True)
class Settings:
    """All options of a training."""

    run: RunOptions = dataclasses.field(default_factory=RunOptions)
    config: Config = dataclasses.field(default_factory=Config)
    hyper: Hyper = dataclasses.field(default_factory=Hyper)

    def to_dict(self) -> dict[str, Any]:
        """Flat and complete, ready for YAML."""
        parts = (self.config, self.hyper, self.run)
        flat = {k: v for part in parts for k, v in vars(part).items()}
        flat = {k: thaw(v) for k, v in flat.items()}
        return flat | {"env_args": dict(self.config.env_args)}


def load_settings(
    env: str | None = None, file: str | Path | None = None, backend: str | None = None
) -> Settings:
    """Settings of a YAML file, or the shipped ones of an environment, over the defaults.

    Args:
        backend: what an environment with several kinds of physics runs on.

    Raises:
        ConfigError: the file cannot be read, or says something that is no option or value.
    """
    if file is not None:
        values, where = _read_yaml(Path(file)), f"{file}: "
    else:
        values, where = _shipped_values(env or Config.env, backend), ""
    values |= {k: v for k, v in (("env", env), ("backend", backend)) if v is not None}
    return make_settings(values, where)


def shipped_config(env: str, backend: str | None = None) -> Path | None:
    """The shipped settings of an environment, if there are any: for a backend of its own, or any."""
    directory, name = _suite_directory(env), env.rpartition("/")[2]
    paths = directory / f"{name}-{backend}.yaml", directory / f"{name}.yaml"
    return next((path for path in paths if path.is_file()), None)


def _suite_directory(env: str) -> Path:
    """Where settings of an environment are, and its suite's defaults."""
    suite, _, name = env.rpartition("/")
    root = config_directory()
    if not suite:
        return root / ("minatar" if name.endswith("-MinAtar") else "gymnax")
    if suite != "envpool":
        return root / suite
    own = [each for each in ("mujoco", "box2d") if (root / each / f"{name}.yaml").is_file()]
    return root / (own[0] if own else "atari" if name.endswith("-v5") else suite)


def _shipped_values(env: str, backend: str | None) -> dict[str, Any]:
    """What defaults.yaml of the suite says, and over it what is shipped for the environment."""
    common = _suite_directory(env) / "defaults.yaml"
    values = _read_yaml(common) if common.is_file() else {}
    path = shipped_config(env, backend)
    own = _read_yaml(path) if path is not None else {}
    meant = backend is None or backend == (values | own).get("backend")
    return values | own if meant else values


def make_settings(values: Mapping[str, Any], where: str = "") -> Settings:
    """Settings from option names and values, the rest at their defaults.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    parts = {"run": RunOptions, "config": Config, "hyper": Hyper}
    hints = {cls: get_type_hints(cls) for cls in parts.values()}
    known = [name for cls in parts.values() for name in hints[cls]]
    for name in values:
        if name not in known:
            raise ConfigError(f"{where}unknown option {name!r}{suggest(name, known)}")
    built = {
        part: cls(
            **{n: coerce(where + n, values[n], t) for n, t in hints[cls].items() if n in values}
        )
        for part, cls in parts.items()
    }
    return Settings(**built)


def config_directory() -> Path:
    """Where the shipped configurations are, in a checkout as in an installed package."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def parse_env_args(items: Iterable[str]) -> EnvArgs:
    """name=value ... with values as YAML reads them.

    Raises:
        ConfigError: an item without a name or without an equals sign.
    """
    pairs = []
    for item in items:
        name, equals, text = item.partition("=")
        if not (name and equals):
            raise ConfigError(f"--env-args takes name=value, not {item!r}")
        pairs.append((name, freeze(yaml.safe_load(text))))
    return tuple(pairs)


def parse_int(text: str) -> int:
    """A whole number, also written 1e6 or 1_000_000.

    Raises:
        ValueError: it is not whole.
    """
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise ValueError(f"{text!r} is not a whole number")


def parse_bytes(text: str) -> int:
    """A size in bytes, written with a unit: 512MiB, 8GB.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def parse_layers(text: str) -> tuple[int, ...]:
    """Widths separated by commas; nothing at all for no layers."""
    return tuple(parse_int(part) for part in text.split(",") if part.strip())


def parse_size(text: str) -> tuple[int, ...]:
    """Height and width, separated by a comma.

    Raises:
        ValueError: with fewer or more.
    """
    size = parse_layers(text)
    if len(size) != 2:
        raise ValueError(f"{text!r} is not HEIGHT,WIDTH")
    return size


def parse_flag(texts: list[str]) -> bool:
    """Of a flag that may be given alone, or with true or false.

    Raises:
        ValueError: with anything else.
    """
    if texts not in ([], ["true"], ["false"]):
        raise ValueError(f"{' '.join(texts)!r} is not true or false")
    return texts != ["false"]


def parse_cnn_layers(text: str) -> CnnLayers:
    """Convolutions by a name of theirs, or as 32x8x4,64x4x2: features x kernel x stride of each.

    Raises:
        ValueError: it is neither.
    """
    if text in CNN_LAYERS:
        return CNN_LAYERS[text]
    try:
        return _convert([part.split("x") for part in text.split(",")], CnnLayers)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not {_describe(CnnLayers)}") from None


def show_cnn_layers(layers: CnnLayers) -> str:
    """Convolutions as `parse_cnn_layers` reads them."""
    names = {known: name for name, known in CNN_LAYERS.items()}
    return names.get(layers, ",".join("x".join(map(str, layer)) for layer in layers))


def freeze(value: Any) -> Any:
    """Lists as tuples, so that the value can be hashed."""
    return tuple(freeze(item) for item in value) if isinstance(value, list) else value


def thaw(value: Any) -> Any:
    """Tuples as lists, as YAML has them."""
    return [thaw(item) for item in value] if isinstance(value, tuple) else value


def suggest(name: str, known: Iterable[str], most: int = 1) -> str:
    """A clause that names what is nearest to a misspelt name, or nothing."""
    lowered = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(lowered[n] for n in near)}?" if near else ""


def check_arguments(env: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first of an environment's arguments that is not known."""
    known = sorted(known)
    for argument in arguments:
        if argument not in known:
            raise ConfigError(
                f"--env-args: {env} has no argument {argument!r}{suggest(argument, known)} "
                f"(it has {', '.join(known)})"
            )


def validate(settings: Settings) -> None:
    """Raises ConfigError for a value out of range or a combination that makes no sense."""
    config, hyper, run = settings.config, settings.hyper, settings.run
    validate_run(run)
    for name in (
        "total_timesteps",
        "num_envs",
        "num_steps",
        "update_epochs",
        "num_minibatches",
        "pool_size",
        "frame_stack",
    ):
        require(getattr(config, name) >= 1, name, getattr(config, name), "at least 1")
    size = config.microbatch_size
    require(size is None or size >= 1, "microbatch_size", size, "at least 1")
    require(min(config.resize or (1,)) >= 1, "resize", config.resize, "sizes of at least 1")
    for name in ("torso_layers", "policy_layers", "value_layers"):
        widths = getattr(config, name)
        require(all(w >= 1 for w in widths or ()), name, widths, "widths of at least 1")
    for layer in config.cnn_layers or ():
        require(min(layer) >= 1, "cnn_layers", layer, "features, kernel and stride of at least 1")
    if config.activation not in (None, *ACTIVATIONS):
        require(False, "activation", config.activation, f"one of {', '.join(ACTIVATIONS)}")
    for name in ("gamma", "gae_lambda"):
        require(0 <= getattr(hyper, name) <= 1, name, getattr(hyper, name), "in 0 ... 1")
    for name in ("ent_coef", "vf_coef"):
        value = getattr(hyper, name)
        require(0 <= value < math.inf, name, value, "at least 0")
    require(math.isfinite(hyper.init_log_std), "init_log_std", hyper.init_log_std, "finite")
    for name in (
        "learning_rate", "critic_learning_rate", "reward_scale", "reward_clip", "clip_eps", "value_clip_eps",
        "max_grad_norm", "adam_eps", "policy_gain", "target_kl", "desired_kl",
    ):  # fmt: skip
        value = getattr(hyper, name)
        require(value is None or value > 0, name, value, "above 0")
    _validate_together(config, hyper, run)


def validate_run(run: RunOptions) -> None:
    """Raises ConfigError for a value out of range."""
    for name in ("seed", "eval_episodes", "metrics_rows", "checkpoint_every", "keep"):
        require(getattr(run, name) >= 0, name, getattr(run, name), "at least 0")
    for name in run.log:
        require(name in _LOGS, "log", name, f"one of {', '.join(_LOGS)}")
    require(run.num_seeds >= 1, "num_seeds", run.num_seeds, "at least 1")
    require(run.seed + run.num_seeds <= 2**32, "seed", run.seed, "below 2**32")
    require(
        run.eval_every is None or run.eval_every >= 0, "eval_every", run.eval_every, "at least 0"
    )
    for name in ("runs_per_block", "samples", "checkpoint_iterations", "video_every"):
        value = getattr(run, name)
        require(value in (None, "auto") or value >= 1, name, value, "at least 1")
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
    if config.minibatches == "sequences" and config.num_envs % config.num_minibatches:
        raise ConfigError(
            f"--num-envs {config.num_envs} is not divisible by --num-minibatches "
            f"{config.num_minibatches}, as --minibatches sequences needs"
        )
    if config.normalize_rewards and hyper.reward_scale != Hyper.reward_scale:
        raise ConfigError(
            f"--reward-scale {hyper.reward_scale} makes no difference with --normalize-rewards"
        )
    if hyper.desired_kl is not None and config.anneal_learning_rate:
        raise ConfigError(
            "--desired-kl and --anneal-learning-rate both set the learning rate: "
            "add --no-anneal-learning-rate"
        )
    if config.reset_mode == "fresh" and config.pool_size != Config.pool_size:
        raise ConfigError(
            f"--pool-size {config.pool_size}: there is no pool with --reset-mode fresh"
        )
    if run.eval_every is not None and not run.eval_episodes:
        raise ConfigError(
            f"--eval-every {run.eval_every}: there are no --eval-episodes; add --eval-every none"
        )


def require(holds: bool, name: str, value: Any, allowed: str) -> None:
    """Raises ConfigError, for the value of an option, unless it holds."""
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: must be {allowed}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: not YAML: {line}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{path}: not a mapping of option names to values")
    return values


def coerce(name: str, value: Any, hint: Any) -> Any:
    """The value as the option's type, or ConfigError."""
    try:
        return _convert(value, hint)
    except (TypeError, ValueError):
        allowed = "name: value" if hint == EnvArgs else _describe(hint)
        raise ConfigError(f"{name}: {value!r} is not {allowed}") from None


def _convert(value: Any, hint: Any) -> Any:
    if hint == EnvArgs:
        return tuple((str(k), freeze(v)) for k, v in dict(value).items())
    if get_origin(hint) in (Union, types.UnionType):
        first, second = get_args(hint)
        if get_origin(first) is Literal:
            return value if value in get_args(first) else _convert(value, second)
        return None if value is None else _convert(value, first)
    if hint == CnnLayers and isinstance(value, str):
        return parse_cnn_layers(value)
    if get_origin(hint) is tuple:
        if isinstance(value, str):
            raise TypeError
        kinds = get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(value)
        return tuple(_convert(item, kind) for item, kind in zip(value, kinds, strict=True))
    if get_origin(hint) is Literal:
        # YAML 1.1 reads off and no as false.
        value = "off" if value is False else value
        if value not in get_args(hint):
            raise ValueError
        return value
    if isinstance(value, bool) != (hint is bool) or (hint is str and not isinstance(value, str)):
        raise TypeError
    return parse_int(str(value)) if hint is int else hint(value)


def _describe(hint: Any) -> str:
    arguments = get_args(hint)
    if hint == CnnLayers:
        return f"one of {', '.join(CNN_LAYERS)}, or features x kernel x stride as 32x8x4,64x4x2"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(part) for part in arguments if part is not types.NoneType)
    if get_origin(hint) is Literal:
        return f"{'one of ' * (len(arguments) > 1)}{', '.join(arguments)}"
    if get_origin(hint) is tuple:
        return "a list of " + {int: "whole numbers"}.get(arguments[0], "texts")
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, str(hint))
