"""Policy and value networks: torsos x heads behind one call signature."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from purejaxppo import gru
from purejaxppo.activations import ACTIVATIONS
from purejaxppo.convolutions import CnnLayers, Conv, conv_shapes
from purejaxppo.products import multiply, rounds_to_tf32
from purejaxppo.types import Scalar


class NetworkOutput(struct.PyTreeNode):
    """What an ActorCritic says about a batch of observations."""

    policy: Array  # [..., O] logits, or the mean of a Gaussian
    log_std: Array | None  # [..., A], None for discrete actions
    value: Array  # [...]
    carry: Any  # [N, H] the memory after the last observation, () without one


class Dense(nn.Module):
    """A dense layer with the fast gradient; `init_params` has the weights it begins with."""

    features: int

    def __call__(self, x: Array) -> Array:
        """X [..., P] -> [..., F]."""
        kernel, bias = self.weights(x.shape[-1])
        return multiply(x, kernel) + bias

    @nn.compact
    def weights(self, inputs: int) -> tuple[Array, Array]:
        """Kernel [P, F] and bias [F]."""
        zeros = nn.initializers.zeros  # Flax traces it in every call, to compare shapes
        kernel = self.param("kernel", zeros, (inputs, self.features))
        return kernel, self.param("bias", zeros, (self.features,))


class Torso(nn.Module):
    """Convolutions, then dense layers, each followed by the activation."""

    cnn_layers: CnnLayers
    layers: tuple[int, ...]
    activation: str
    convolution: Literal["auto", "patches", "xla"]
    dense: Literal["auto", "xla", "fused"]

    @nn.compact
    def __call__(self, x: Array, head: Dense | None = None) -> Array:
        """X [..., F], or [..., H, W, C] where there are convolutions; in the end through the head."""
        activation = ACTIVATIONS[self.activation]
        for features, size, stride in self.cnn_layers:
            x = activation(Conv(features, size, stride, self.convolution)(x))
        if self.cnn_layers:
            x = x.reshape(*x.shape[:-3], math.prod(x.shape[-3:]))
        layers = [Dense(width) for width in self.layers]
        if head is not None and self._fuses():
            from purejaxppo.fused import fused_layers  # imports Pallas, which takes a while

            layers.append(head)
            inputs = [x.shape[-1], *self.layers]
            weights = [layer.weights(size) for layer, size in zip(layers, inputs, strict=True)]
            return fused_layers(x, weights, self.activation)
        for layer in layers:
            x = activation(layer(x))
        return x if head is None else head(x)

    def _fuses(self) -> bool:
        if self.dense == "auto":
            return rounds_to_tf32()
        return self.dense == "fused" and jax.default_backend() != "tpu"


class Memory(nn.Module):
    """A gated recurrent unit, see `gru.step`."""

    units: int

    @nn.compact
    def __call__(self, x: Array, carry: Array, first: Array) -> tuple[Array, Array]:
        """The memory after each observation, and after the last one [N, H].

        Args:
            x: [N, F] of an observation, or [N, T, F] of T in a row.
            carry: [N, H] the memory before them.
            first: [N] or [N, T] bool, the observation begins an episode: all before is forgotten.
        """
        inputs, zeros = Dense(3 * self.units, name="inputs")(x), nn.initializers.zeros
        kernel = self.param("recurrent_kernel", zeros, (self.units, 3 * self.units))
        bias = self.param("candidate_bias", zeros, (self.units,))
        bias = jnp.pad(bias, (2 * self.units, 0))  # the gates have that of the inputs
        if first.ndim == 1:
            after = gru.step(inputs, first, carry, kernel, bias)
            return after, after
        by_time = jnp.moveaxis(inputs, 1, 0), jnp.moveaxis(first, 1, 0)
        memory = gru.unroll(*by_time, carry, kernel, bias)
        return jnp.moveaxis(memory, 0, 1), memory[-1]


class ActorCritic(nn.Module):
    """torso -> policy layers -> policy head, and torso -> value layers -> value head.

    Attributes:
        num_outputs: O of the policy head.
        gru_units: H of a memory between a shared torso and the layers of each part; 0 for none.
        log_std: None (discrete actions), "parameter", or "state" for a head of its own.
    """

    num_outputs: int
    cnn_layers: CnnLayers
    torso_layers: tuple[int, ...]
    policy_layers: tuple[int, ...]
    value_layers: tuple[int, ...]
    gru_units: int
    shared_torso: bool
    activation: str
    convolution: Literal["auto", "patches", "xla"]
    dense: Literal["auto", "xla", "fused"]
    log_std: str | None

    def setup(self) -> None:
        """The torsos, then the layers and the head of each part."""
        cnn, dense = self.cnn_layers, self.torso_layers
        if self.shared_torso:
            self.torso = self._torso(cnn, dense)
            cnn, dense = (), ()
        if self.gru_units:
            self.memory = Memory(self.gru_units)
        self.policy = self._torso(cnn, dense + self.policy_layers)
        self.value = self._torso(cnn, dense + self.value_layers)
        self.policy_head = Dense(self.num_outputs)
        self.value_head = Dense(1)
        if self.log_std == "parameter":
            self.log_std_value = self.param("log_std", nn.initializers.zeros, (self.num_outputs,))
        elif self.log_std == "state":
            self.log_std_head = Dense(self.num_outputs)

    def num_units(self, shape: tuple[int, ...]) -> int:
        """Numbers that all layers hold for one observation of a shape, patches of images among them."""
        units = sum(self.torso_layers)
        for conv in conv_shapes(self.cnn_layers, shape):
            units += conv.positions * (conv.patch + conv.features)
        units *= 1 if self.shared_torso else 2
        units += 8 * self.gru_units  # seen and recalled for three gates, memory before and after
        return units + sum(self.policy_layers) + sum(self.value_layers) + self.num_outputs + 1

    def _torso(self, cnn_layers: CnnLayers, layers: tuple[int, ...]) -> Torso:
        return Torso(cnn_layers, layers, self.activation, self.convolution, self.dense)

    def __call__(self, x: Array, carry: Any, first: Array) -> NetworkOutput:
        """X [..., F] or images [..., H, W, C]; with a memory as that is called."""
        features, carry = self._features(x, carry, first)
        if self.log_std == "state":
            policy = self.policy(features)
            mean, log_std = self.policy_head(policy), self.log_std_head(policy)
            return NetworkOutput(mean, jnp.clip(log_std, -20.0, 2.0), self._value(features), carry)
        mean, log_std = self.policy(features, self.policy_head), None
        if self.log_std == "parameter":
            log_std = jnp.broadcast_to(self.log_std_value, mean.shape)
        return NetworkOutput(mean, log_std, self._value(features), carry)

    def value_alone(self, x: Array, carry: Any, first: Array) -> Array:
        """[...] the value that `__call__` gives; the policy need not be traced for it."""
        return self._value(self._features(x, carry, first)[0])

    def _features(self, x: Array, carry: Any, first: Array) -> tuple[Array, Any]:
        """What both parts see, and the memory after the last observation."""
        if self.shared_torso:
            x = self.torso(x)
        return self.memory(x, carry, first) if self.gru_units else (x, carry)

    def _value(self, features: Array) -> Array:
        return self.value(features, self.value_head).squeeze(-1)


def init_params(
    network: nn.Module, key: Array, example: tuple, policy_gain: Scalar, init_log_std: Scalar
) -> Any:
    """Orthogonal weights (Saxe et al., 2014) with PPO's usual gains, biases of zero, scales of one.

    Gains are sqrt(2) for hidden layers, 1 for a memory and the value's head, policy_gain for the policy's
    and 0.01 for that of a log-std; the log standard deviation starts at init_log_std.

    Args:
        network: whose `init(key, *example)` gives the shapes.
        key: consumed.
        policy_gain, init_log_std: [].

    Raises:
        ValueError: a parameter of a name that nothing is said of here.
    """
    gains = {"value_head": 1.0, "policy_head": policy_gain, "log_std_head": 0.01}
    gains |= {"memory": 1.0, "inputs": 1.0}
    shapes = jax.eval_shape(network.init, jax.random.key(0), *example)["params"]
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    kernels = [leaf.shape for path, leaf in leaves if path[-1].key.endswith("kernel")]
    weights = iter(orthogonal(key, kernels))
    params = []
    for path, leaf in leaves:
        if path[-1].key.endswith("kernel"):
            params.append(gains.get(path[-2].key, 2**0.5) * next(weights))
        else:
            fill = _fill(path, init_log_std)
            params.append(jnp.full(leaf.shape, fill, leaf.dtype))
    return jax.tree.unflatten(treedef, params)


def _fill(path: Any, init_log_std: Scalar) -> Scalar:
    """What a parameter that is no kernel begins with."""
    match path[0].key, path[-1].key:
        case (("log_std" | "log_std_head"), _):
            return init_log_std
        case _, ("bias" | "candidate_bias"):
            return 0.0
        case _, "scale":  # of a normalisation
            return 1.0
    raise ValueError(f"init_params: what does {jax.tree_util.keystr(path)} begin with?")


def orthogonal(key: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    """An array [..., n] of each shape whose rows or columns are orthonormal, uniformly drawn.

    Each is the polar factor of a normal matrix, by Newton and Schulz's iteration: products of
    matrices only. A QR decomposition calls LAPACK, which can wait for ever when several CPU devices
    share the cores. All are drawn at once and iterated in one loop, which compiles fastest.

    Args:
        key: consumed.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    parts = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    matrices = []
    for part, shape in zip(parts, shapes, strict=True):
        rows, columns = part.size // shape[-1], shape[-1]
        # Singular values reach about rows^.5 + columns^.5; below sqrt(3) of it, all go to 1.
        matrices.append(part.reshape(rows, columns) / (rows**0.5 + columns**0.5))
    # Each step squares the error.
    matrices, _ = jax.lax.while_loop(
        lambda carry: carry[1] > 1e-3,
        lambda carry: _newton_schulz(carry[0]),
        (matrices, jnp.float32(jnp.inf)),
    )
    return [matrix.reshape(shape) for matrix, shape in zip(matrices, shapes, strict=True)]


def _newton_schulz(matrices: list[Array]) -> tuple[list[Array], Array]:
    """One step towards the nearest matrices with orthonormal rows or columns, and how far they were."""
    product = functools.partial(jnp.matmul, precision="highest")
    stepped, errors = [], []
    for x in matrices:
        tall = x.shape[0] > x.shape[1]
        gram = product(x.T, x) if tall else product(x, x.T)
        stepped.append(1.5 * x - 0.5 * (product(x, gram) if tall else product(gram, x)))
        errors.append(jnp.max(jnp.abs(gram - jnp.eye(len(gram)))))
    return stepped, jnp.max(jnp.stack(errors))
