"""What a training is: `Config` decides what compiles, `Hyper` is traced, `RunOptions` is the rest.

The type of an option says what can be swept in one compiled program: every field of `Hyper`, and
the seed. All three are written to and read from one flat YAML file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml
from flax import struct

from purejaxppo.convolutions import CnnLayers
from purejaxppo.values import ConfigError, EnvArgs, coerce, suggest, thaw

# Our options by what CleanRL, Stable-Baselines3, Brax and PureJaxRL call them, where that is far from ours.
_ELSEWHERE = {
    "total_timesteps": "steps total_steps timesteps n_timesteps num_timesteps",
    "env_args": "env_kwargs env_params",
    "env": "env_name environment",
    "num_steps": "n_steps rollout_length unroll_length",
    "update_epochs": "epochs n_epochs num_epochs num_updates_per_batch",
    "num_minibatches": "batch_size minibatch_size n_minibatches",
    "torso_layers": "layers hidden_size hidden_sizes hidden_layer_sizes net_arch",
    "gru_units": "lstm_hidden_size rnn_hidden_size hidden_state_size",
    "normalize_observations": "norm_obs normalize_env",
    "normalize_rewards": "norm_reward",
    "normalize_advantages": "norm_adv normalize_advantage",
    "anneal_learning_rate": "anneal_lr",
    "learning_rate": "lr actor_lr",
    "critic_learning_rate": "critic_lr",
    "gamma": "discount discounting",
    "gae_lambda": "lam lambda",
    "clip_eps": "clip_range clip_coef clip_ratio clipping_epsilon",
    "value_clip_eps": "clip_range_vf clip_vloss",
    "ent_coef": "entropy_coef entropy_cost",
    "vf_coef": "value_coef",
    "init_log_std": "log_std_init",
    "num_seeds": "seeds n_seeds",
    "eval_every": "eval_freq eval_interval",
    "video_every": "capture_video",
    "log": "track wandb tensorboard tensorboard_log",
    "checkpoint_every": "save_freq",
    "run_dir": "log_dir save_dir output output_dir",
}


def our_name(name: str) -> str:
    """The option that another library calls by this name; the name itself where none is known to."""
    found = (own for own, others in _ELSEWHERE.items() if name in others.split())
    return next(found, name)


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
    """Minibatches in a pass; num_envs * num_steps must be a multiple, with sequences num_envs."""
    microbatch_size: int | None = None
    """Most samples whose gradients are computed at a time; by default a minibatch, on a CPU nearly what its caches hold. Sequences stay whole."""
    minibatches: Literal["auto", "samples", "sequences"] = "auto"
    """Minibatches of single samples, or of whole rollouts of some of the environments; auto: samples, with a GRU sequences."""
    cnn_layers: CnnLayers | None = None
    """Convolutions, features x kernel x stride of each, or nature, nips, minatar, flat (none); by default what fits."""
    torso_layers: tuple[int, ...] | None = None
    """Widths of the dense layers of a torso; by default 64,64, after convolutions 512, of small images 256 or 128."""
    policy_layers: tuple[int, ...] = ()
    """Widths of further layers of the policy."""
    value_layers: tuple[int, ...] = ()
    """Widths of further layers of the value function."""
    gru_units: int | None = None
    """Units of a GRU after the torso: a memory of the episode so far; none when not given."""
    shared_torso: bool | None = None
    """One torso for policy and value instead of one each; by default only with convolutions or a GRU."""
    activation: str | None = None
    """Activation function: tanh, relu, swish, gelu or elu; by default tanh, with convolutions relu."""
    convolution: Literal["auto", "patches", "xla"] = "auto"
    """patches: by products of them; xla: by XLA's own convolution; auto: what is fastest on CPUs, patches on GPUs, xla on TPUs."""
    dense: Literal["auto", "xla", "fused"] = "auto"
    """xla: XLA's product for each dense layer; fused: small ones are one kernel on GPUs, which CPUs interpret, slowly; auto: fused on NVIDIA's from Ampere on, unless products are to be more exact than TF32."""
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
    recompute_advantages: bool = False
    """Take values and advantages anew before every epoch, with the parameters it begins with."""
    anneal_learning_rate: bool = True
    """Lower the learning rates linearly to 0 over the training."""
    anneal_clip_eps: bool = False
    """Lower clip_eps and value_clip_eps linearly to 0."""
    anneal_ent_coef: bool = False
    """Lower ent_coef linearly to 0."""
    reset_mode: Literal["pool", "fresh"] = "pool"
    """fresh: a new start state at every reset; pool: from a pool drawn for each rollout."""
    pool_size: int = 8
    """P start states of an environment in a rollout's pool: after its step t comes number t % P."""

    @property
    def env_options(self) -> dict[str, Any]:
        """All that the environment's factory is given."""
        return dict(self.env_args) | ({"backend": self.backend} if self.backend else {})

    @property
    def in_sequences(self) -> bool:
        """Whether minibatches are of sequences."""
        return self.minibatches == "sequences" or self.gru_units is not None

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
    """Adapt learning_rate, between 1e-5 and 1e-2, to keep approx_kl near this; the critic's likewise."""

    def scaled(self, factor: Any, *names: str) -> Hyper:
        """With these multiplied by a factor [], but those that are not given."""
        given = {name: getattr(self, name) for name in names}
        return self.replace(**{n: factor * x for n, x in given.items() if x is not None})


@dataclass(frozen=True)
class RunOptions:
    """Seeds, evaluation and output."""

    seed: int = 0
    """First seed of every setting; the others follow it."""
    num_seeds: int = 1
    """Runs of every setting, one seed each."""
    eval_every: int | None = None
    """Environment steps between evaluations, in whole iterations; 0 for one at the end. By default a training has 20."""
    eval_sampled: bool = False
    """Evaluate with sampled actions instead of the most likely ones."""
    eval_episodes: int = 128
    """Episodes of an evaluation; 0 for none."""
    video_every: int | None = None
    """Environment steps between videos of a run's policy, in videos/; none when not given."""
    log: tuple[str, ...] = ()
    """Where curves and videos go beside the run directory: tensorboard, wandb."""
    metrics_rows: int = 1000
    """Most rows a run has in metrics.csv for the steps it begins with, 0 for one an iteration."""
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
    """Runs vmapped at a time on a device. auto: on a CPU what a core's cache holds, up to 8; else what fits in memory."""
    memory_limit: str | None = None
    """Memory to plan for, as 8GiB, of each accelerator or of a process on CPUs; by default what is free. To compile may take more."""
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
    """Ask XLA for deterministic operations on a GPU; CPUs need none."""
    compile_effort: Literal["auto", "quick", "full"] = "auto"
    """Full, for programs that run fast; quick, to have them sooner; auto: quick where a training is too short for full to pay, on TPUs never."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache directory, so that a second run starts fast."""


@dataclass(frozen=True)
class Settings:
    """All options of a training."""

    # With a word of help, or Tyro would look for it in this file at each start.
    run: RunOptions = dataclasses.field(
        default_factory=RunOptions, metadata={"help": RunOptions.__doc__}
    )
    config: Config = dataclasses.field(default_factory=Config, metadata={"help": Config.__doc__})
    hyper: Hyper = dataclasses.field(default_factory=Hyper, metadata={"help": Hyper.__doc__})

    def to_dict(self) -> dict[str, Any]:
        """Flat and complete, ready for YAML."""
        parts = (self.config, self.hyper, self.run)
        flat = {k: thaw(v) for part in parts for k, v in vars(part).items()}
        return flat | {"env_args": dict(self.config.env_args)}


def read_settings(
    env: str | None = None, file: str | Path | None = None, backend: str | None = None
) -> Settings:
    """Settings of a YAML file, or the shipped ones of an environment, over the defaults.

    Args:
        env: its full name, as `brax/ant`; `envs.load_settings` knows the others.
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


def suite_defaults(env: str) -> Path | None:
    """The shipped settings of an environment's whole suite, if there are any."""
    path = _suite_directory(env) / "defaults.yaml"
    return path if path.is_file() else None


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
    common, path = suite_defaults(env), shipped_config(env, backend)
    values = _read_yaml(common) if common is not None else {}
    own = _read_yaml(path) if path is not None else {}
    meant = backend is None or backend == (values | own).get("backend")
    return values | own if meant else values


def make_settings(values: Mapping[str, Any], where: str = "") -> Settings:
    """Settings from option names and values, the rest at their defaults.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type.
    """
    hints = {cls: get_type_hints(cls) for cls in (RunOptions, Config, Hyper)}
    known = [name for own in hints.values() for name in own]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{where}unknown option {name!r}{suggest(our_name(name.lower()), known)}"
            )
    parts: list[Any] = [
        cls(**{n: coerce(where + n, values[n], t) for n, t in own.items() if n in values})
        for cls, own in hints.items()
    ]
    return Settings(*parts)


def config_directory() -> Path:
    """Where the shipped configurations are, in a checkout as in an installed package."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


class _Loader(yaml.SafeLoader):
    """YAML's own lets the last of several values win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; raises yaml.YAMLError where a key is there twice."""
        names = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"{key.value} is there again in line {line}")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # of a date that there is not, or of bytes
        line = " ".join(str(error).split())
        raise ConfigError(f"{path}: not YAML: {line}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{path}: not a mapping of option names to values")
    return values
