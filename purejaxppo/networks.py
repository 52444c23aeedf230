"""Policy and value networks: torsos x heads behind one call signature."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": nn.tanh,
    "relu": nn.relu,
    "swish": nn.swish,
    "gelu": nn.gelu,
    "elu": nn.elu,
}


class NetworkOutput(struct.PyTreeNode):
    """What an ActorCritic says about a batch of observations."""

    policy: Array  # [..., O] logits, or the mean of a Gaussian
    log_std: Array | None  # [..., A], None for discrete actions
    value: Array  # [...]
    carry: Any  # the torso's memory after this observation, () without one


class MLP(nn.Module):
    """Dense layers, each followed by the activation."""

    layers: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.layers:
            x = ACTIVATIONS[self.activation](nn.Dense(width)(x))
        return x


class ActorCritic(nn.Module):
    """torso -> policy layers -> policy head, and torso -> value layers -> value head.

    Attributes:
        num_outputs: O of the policy head.
        log_std: None (discrete actions), "parameter", or "state" for a head of its own.
    """

    num_outputs: int
    torso_layers: tuple[int, ...]
    policy_layers: tuple[int, ...]
    value_layers: tuple[int, ...]
    shared_torso: bool
    activation: str
    log_std: str | None

    def setup(self) -> None:
        """The torsos, then the layers and the head of each part."""
        if self.shared_torso:
            self.torso = MLP(self.torso_layers, self.activation)
            self.policy = MLP(self.policy_layers, self.activation)
            self.value = MLP(self.value_layers, self.activation)
        else:
            self.policy = MLP(self.torso_layers + self.policy_layers, self.activation)
            self.value = MLP(self.torso_layers + self.value_layers, self.activation)
        self.policy_head = nn.Dense(self.num_outputs)
        self.value_head = nn.Dense(1)
        if self.log_std == "parameter":
            self.log_std_value = self.param("log_std", nn.initializers.zeros, (self.num_outputs,))
        elif self.log_std == "state":
            self.log_std_head = nn.Dense(self.num_outputs)

    def __call__(self, x: Array, carry: Any, first: Array) -> NetworkOutput:
        """X [..., F] features, carry and first [...] for torsos with memory."""
        del first  # an MLP has no memory to clear
        features = self.torso(x) if self.shared_torso else x
        policy = self.policy(features)
        value = self.value_head(self.value(features)).squeeze(-1)
        mean = self.policy_head(policy)
        log_std = None
        if self.log_std == "parameter":
            log_std = jnp.broadcast_to(self.log_std_value, mean.shape)
        elif self.log_std == "state":
            log_std = jnp.clip(self.log_std_head(policy), -20.0, 2.0)
        return NetworkOutput(mean, log_std, value, carry)


def init_params(network: nn.Module, key: Array, example: tuple, init_log_std: Array) -> Any:
    """Orthogonal weights (Saxe et al., 2014) with PPO's usual gains, biases of zero.

    Gains are sqrt(2) for hidden layers, 0.01 for the policy's and log-std's heads and 1 for the
    value's; the log standard deviation starts at init_log_std.

    Args:
        network: whose `init(key, *example)` gives the shapes.
        key: consumed.
        init_log_std: [].
    """
    gains = {"value_head": 1.0, "policy_head": 0.01, "log_std_head": 0.01}
    shapes = jax.eval_shape(network.init, jax.random.key(0), *example)["params"]
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    kernels = [leaf.shape for path, leaf in leaves if path[-1].key == "kernel"]
    weights = iter(orthogonal(key, kernels))
    params = []
    for path, leaf in leaves:
        if path[-1].key == "kernel":
            params.append(gains.get(path[-2].key, 2**0.5) * next(weights))
        else:
            fill = init_log_std if path[0].key.startswith("log_std") else 0.0
            params.append(jnp.full(leaf.shape, fill, leaf.dtype))
    return jax.tree.unflatten(treedef, params)


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
    matrices = jax.lax.fori_loop(0, 40, lambda _, x: list(map(_newton_schulz, x)), matrices)
    return [matrix.reshape(shape) for matrix, shape in zip(matrices, shapes, strict=True)]


def _newton_schulz(x: Array) -> Array:
    """One step towards the nearest matrix with orthonormal rows or columns."""
    product = functools.partial(jnp.matmul, precision="highest")
    tall = x.shape[0] > x.shape[1]
    return 1.5 * x - 0.5 * (product(x, product(x.T, x)) if tall else product(product(x, x.T), x))
