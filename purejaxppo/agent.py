"""Parameters and statistics -> (policy, value, carry), and the optimiser."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.flatten_util import ravel_pytree

from purejaxppo import stats
from purejaxppo.config import Config, Hyper
from purejaxppo.convolutions import CNN_LAYERS, CnnLayers, conv_shapes
from purejaxppo.distributions import (
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    TanhGaussian,
    num_outputs,
)
from purejaxppo.networks import ActorCritic, NetworkOutput, init_params
from purejaxppo.spaces import Box, Discrete, MultiDiscrete, Space
from purejaxppo.values import ConfigError, show_cnn_layers

LEARNING_RATES = ("learning_rate", "critic_learning_rate")
# An adaptive learning rate stays between these, and moves by this factor (Rudin et al., 2022).
_ADAPTIVE_BOUNDS, _ADAPTIVE_FACTOR = (1e-5, 1e-2), 1.5
# Convolutions and dense layers of images whose smaller side is so long at least.
_BY_SIDE: tuple[tuple[int, str, tuple[int, ...]], ...] = (
    (36, "nature", (512,)),
    (20, "nips", (256,)),
    (3, "minatar", (128,)),
    (0, "flat", (64, 64)),
)
# What approx_kl of an unchanged policy stays below in float32.
_ROUNDING_KL = 1e-7


class AgentOutput(struct.PyTreeNode):
    """What the agent says about a batch of observations."""

    policy: Distribution  # [...]
    value: Array  # [...] in the units of the scaled reward
    carry: Any  # [N, H] memory after the last observation, () without one


class OptState(struct.PyTreeNode):
    """Adam's moments, and the factor on the learning rates where it adapts to the KL divergence."""

    adam: optax.OptState  # moments [P], of all parameters in one vector
    adaptive_scale: Array | None  # []


@dataclass(frozen=True)
class Agent:
    """The network between an observation and an action space. Static: it holds no parameters."""

    observation_space: Space
    action_space: Space
    network: ActorCritic
    squash: bool  # tanh-Gaussian instead of a clipped one

    @property
    def num_units(self) -> int:
        """Numbers that the layers of the network hold for one observation."""
        return self.network.num_units(self.observation_space.shape)

    def init(self, key: Array, hyper: Hyper) -> Any:
        """Parameters; consumes key."""
        features = self._features(None, jnp.zeros((1, *self.observation_space.shape), jnp.uint8))
        example = (features, self.init_carry(1), jnp.ones(1, bool))
        return init_params(self.network, key, example, hyper.policy_gain, hyper.init_log_std)

    def init_carry(self, num_envs: int) -> Any:
        """[N, H] memory at the start of N episodes, () without one."""
        units = self.network.gru_units
        return jnp.zeros((num_envs, units)) if units else ()

    def apply(
        self, params: Any, obs_stats: stats.Moments | None, obs: Array, carry: Any, first: Array
    ) -> AgentOutput:
        """Policy and value of a batch.

        Args:
            obs: [..., *observation_space.shape], as the environment gives it; with a memory [N, ...] of a
                step, or [N, T, ...] of T steps in a row.
            carry: [N, H] memory before these observations.
            first: [...] bool, the observation begins an episode.
        """
        features = self._features(obs_stats, obs)
        output: Any = self.network.apply({"params": params}, features, carry, first)
        return AgentOutput(self._policy(output), output.value, output.carry)

    def value(
        self, params: Any, obs_stats: stats.Moments | None, obs: Array, carry: Any, first: Array
    ) -> Array:
        """[...] the value that `apply` gives, alone."""
        features, method = self._features(obs_stats, obs), self.network.value_alone
        value: Any = self.network.apply({"params": params}, features, carry, first, method=method)
        return value

    def _features(self, obs_stats: stats.Moments | None, obs: Array) -> Array:
        """[..., F] float32, or images [..., H, W, C] where the network has convolutions.

        One-hot for a Discrete space, else normalised; bytes that are not lie in 0 ... 1, or stay
        bytes for convolutions, as bits do.
        """
        if isinstance(self.observation_space, Discrete):
            return jax.nn.one_hot(obs, self.observation_space.n)
        if self.network.cnn_layers and obs_stats is None:
            if is_bytes(self.observation_space):
                return obs.astype(jnp.uint8)
            if obs.dtype == bool:
                return obs
        obs = obs.astype(jnp.float32)
        if obs_stats is not None:
            obs = stats.normalize(obs_stats, obs)
        elif is_bytes(self.observation_space):
            obs = obs / 255.0
        if self.network.cnn_layers:
            return obs
        shape = self.observation_space.shape
        return obs.reshape(*obs.shape[: obs.ndim - len(shape)], math.prod(shape))

    def _policy(self, output: NetworkOutput) -> Distribution:
        match self.action_space:
            case Discrete():
                return Categorical(output.policy)
            case MultiDiscrete(nvec):
                return MultiCategorical(output.policy, nvec)
            case Box():
                low, high = map(jnp.ravel, self.action_space.bounds)
                assert output.log_std is not None
                if self.squash:
                    return TanhGaussian(output.policy, output.log_std, low, high)
                # The network speaks in half-widths of the box, where the box has a width.
                center, scale = map(jnp.ravel, self.action_space.center_and_scale)
                mean, log_std = center + scale * output.policy, output.log_std + jnp.log(scale)
                return Gaussian(mean, log_std, low, high)


def make_agent(config: Config, observation_space: Space, action_space: Space) -> Agent:
    """The agent for two spaces.

    Raises:
        ConfigError: an option does not fit the spaces.
    """
    check_spaces(config, observation_space, action_space)
    continuous = isinstance(action_space, Box)
    cnn_layers, torso_layers = _torso_layers(config, observation_space.shape)
    if not cnn_layers and config.convolution != Config.convolution:
        raise ConfigError(
            f"--convolution {config.convolution}: the network for {config.env} has no convolutions"
        )
    network = ActorCritic(
        num_outputs=num_outputs(action_space),
        cnn_layers=cnn_layers,
        torso_layers=torso_layers,
        policy_layers=config.policy_layers,
        value_layers=config.value_layers,
        gru_units=config.gru_units or 0,
        shared_torso=bool(cnn_layers or config.gru_units)
        if config.shared_torso is None
        else config.shared_torso,
        activation=config.activation or ("relu" if cnn_layers else "tanh"),
        convolution=config.convolution,
        dense=config.dense,
        log_std=config.log_std if continuous else None,
    )
    squash = config.action_distribution == "tanh_gaussian"
    return Agent(observation_space, action_space, network, squash)


def _torso_layers(config: Config, shape: tuple[int, ...]) -> tuple[CnnLayers, tuple[int, ...]]:
    """Convolutions and widths of dense layers: those asked for, or else those that fit the shape.

    Raises:
        ConfigError: convolutions do not fit it.
    """
    cnn_layers, torso_layers = config.cnn_layers, config.torso_layers
    side = min(shape[:2]) if len(shape) == 3 else 0
    name, layers = next((cnn, dense) for least, cnn, dense in _BY_SIDE if side >= least)
    if cnn_layers is None:
        cnn_layers = CNN_LAYERS[name]
    if torso_layers is None:
        torso_layers = layers if cnn_layers else (64, 64)
    try:
        conv_shapes(cnn_layers, shape)
    except ValueError as error:
        raise ConfigError(
            f"--cnn-layers {show_cnn_layers(cnn_layers)} does not fit the observations of "
            f"{config.env}, {list(shape)}: {error}"
        ) from None
    return cnn_layers, torso_layers


def check_spaces(config: Config, observation_space: Space, action_space: Space) -> None:
    """Raises ConfigError where an option does not fit the spaces."""
    if isinstance(observation_space, MultiDiscrete):
        raise ConfigError(f"{config.env}: observations {observation_space} are not supported")
    if 0 in observation_space.shape:
        raise ConfigError(
            f"{config.env}: there is nothing in its observations, {observation_space}"
        )
    if config.normalize_observations and isinstance(observation_space, Discrete):
        raise ConfigError(
            f"--normalize-observations does not fit {config.env}: its observations are "
            f"{observation_space}, which is one-hot encoded"
        )
    choices = getattr(action_space, "nvec", ()), (getattr(action_space, "n", 1),)
    if any(n < 1 for n in itertools.chain(action_space.shape, *choices)):
        raise ConfigError(
            f"{config.env}: there is nothing to choose among its actions, {action_space}"
        )
    wanted = config.action_distribution
    if not isinstance(action_space, Box):
        if wanted not in ("auto", "categorical"):
            raise ConfigError(
                f"--action-distribution {wanted} does not fit {config.env}, whose actions are "
                f"{action_space}: use categorical"
            )
        if config.log_std != Config.log_std:
            raise ConfigError(
                f"--log-std {config.log_std} does not fit {config.env}, whose actions are "
                f"{action_space}"
            )
        return
    if not action_space.dtype.startswith("float"):
        raise ConfigError(
            f"{config.env}: actions {action_space} of whole numbers are not supported"
        )
    low, high = action_space.bounds
    if wanted == "categorical":
        raise ConfigError(
            f"--action-distribution categorical does not fit {config.env}, whose actions are "
            f"{action_space}: use gaussian or tanh_gaussian"
        )
    if wanted == "tanh_gaussian" and not all(map(math.isfinite, [*low.flat, *high.flat])):
        raise ConfigError(
            f"--action-distribution tanh_gaussian needs finite bounds, and the actions of "
            f"{config.env} are {action_space}: use gaussian"
        )


def is_bytes(space: Space) -> bool:
    """Whether observations are those of an image as cameras give them, 0 ... 255."""
    return isinstance(space, Box) and space.dtype == "uint8"


def init_optimizer(hyper: Hyper, params: Any) -> OptState:
    """The optimiser's state before the first update."""
    adaptive_scale = None if hyper.desired_kl is None else jnp.ones(())
    flat, _ = ravel_pytree(params)
    return OptState(_adam(hyper).init(flat), adaptive_scale)


def adapt_learning_rate(hyper: Hyper, opt_state: OptState, approx_kl: Array) -> OptState:
    """Slows down where the policy moved more than twice desired_kl, speeds up below half of it.

    Where it has not moved, in the first minibatch of an iteration, that says nothing.
    """
    if hyper.desired_kl is None or opt_state.adaptive_scale is None:
        return opt_state
    factor = jnp.where(approx_kl > 2 * hyper.desired_kl, 1 / _ADAPTIVE_FACTOR, 1.0)
    slow = (approx_kl < hyper.desired_kl / 2) & (approx_kl > _ROUNDING_KL)
    factor = jnp.where(slow, _ADAPTIVE_FACTOR, factor)
    slowest, fastest = (bound / hyper.learning_rate for bound in _ADAPTIVE_BOUNDS)
    return opt_state.replace(
        adaptive_scale=jnp.clip(opt_state.adaptive_scale * factor, slowest, fastest)
    )


def adapted_rates(hyper: Hyper, opt_state: OptState) -> Hyper:
    """With the learning rates that `adapt_learning_rate` has come to."""
    scale = opt_state.adaptive_scale
    return hyper if scale is None else hyper.scaled(scale, *LEARNING_RATES)


def apply_gradients(
    hyper: Hyper, params: Any, opt_state: OptState, grads: Array
) -> tuple[Any, OptState, Array]:
    """One step of Adam on globally clipped gradients.

    The value network (with its torso, unless shared) has critic_learning_rate where one is given.
    Adam treats every parameter by itself, so this is a second optimiser for those parameters.
    All of them are one vector meanwhile: a few kernels instead of a few for each layer.

    Args:
        grads: [P], from `as_vector`.

    Returns:
        Parameters, optimiser state, and [] the gradients' norm before clipping.
    """
    flat, unravel = ravel_pytree(params)
    flat_updates: Any
    flat_updates, adam = _adam(hyper).update(grads, opt_state.adam, flat)
    updates = unravel(flat_updates)
    critic_rate = hyper.critic_learning_rate
    if critic_rate is None:
        critic_rate = hyper.learning_rate
    stepped = {}
    for name, branch in params.items():
        rate = critic_rate if name in ("value", "value_head") else hyper.learning_rate
        stepped[name] = jax.tree.map(lambda p, u, r=rate: p - r * u, branch, updates[name])
    return stepped, opt_state.replace(adam=adam), optax.tree.norm(grads)


@jax.custom_batching.custom_vmap
def as_vector(tree: Any) -> Array:
    """What `ravel_pytree` makes of a tree, but of one run on a CPU, one leaf is written after the other.

    XLA on CPUs fuses a concatenation with what it is made of, and then reads masked beyond the end of
    small leaves. Now and then that takes a hundred times as long, it seems where no memory is mapped.
    What is written first becomes a fill of the whole vector, and is fused too: it is a kernel's gradient,
    a product, which stays by itself. The sum for log_std would be taken for every number of the vector.
    """
    if jax.default_backend() != "cpu":
        return ravel_pytree(tree)[0]
    leaves = jax.tree.leaves(tree)
    start = sum(leaf.size for leaf in leaves)
    vector = jnp.zeros(start)
    for leaf in reversed(leaves):
        start -= leaf.size
        vector = jax.lax.dynamic_update_slice(vector, jnp.ravel(leaf), (start,))
    return vector


@as_vector.def_vmap
def _as_vectors(size: int, in_batched: list[Any], tree: Any) -> tuple[Array, bool]:
    """Of several runs: there the concatenation is the fast one, by 1.7 times of a whole sweep."""
    axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched[0])
    ravel = jax.vmap(lambda leaves: ravel_pytree(leaves)[0], (axes,), axis_size=size)
    return ravel(tree), True


def _adam(hyper: Hyper) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(hyper.max_grad_norm), optax.scale_by_adam(eps=hyper.adam_eps)
    )
