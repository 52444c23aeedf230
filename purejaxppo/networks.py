"""Policy and value networks: torsos x heads behind one call signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
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
    value's; the log standard deviation starts at init_log_std. All weights come from one normal
    draw: one random site for every layer keeps compilation short.

    Args:
        network: whose `init(key, *example)` gives the shapes.
        key: consumed.
        init_log_std: [].
    """
    shapes = jax.eval_shape(network.init, jax.random.key(0), *example)["params"]
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    normal = jax.random.normal(key, (sum(leaf.size for _, leaf in leaves),))
    params, start = [], 0
    for path, leaf in leaves:
        names = [part.key for part in path]
        if names[-1] == "kernel":
            weights = normal[start : start + leaf.size].reshape(leaf.shape)
            gain = {"value_head": 1.0, "policy_head": 0.01, "log_std_head": 0.01}.get(names[-2])
            params.append((2**0.5 if gain is None else gain) * orthogonalize(weights))
        else:
            fill = init_log_std if names[0].startswith("log_std") else 0.0
            params.append(jnp.full(leaf.shape, fill, leaf.dtype))
        start += leaf.size
    return jax.tree.unflatten(treedef, params)


def orthogonalize(normal: Array) -> Array:
    """[..., n] -> [..., n] with orthonormal rows or columns, uniform where entries are normal.

    The polar factor by Newton and Schulz's iteration: products of matrices only. A QR
    decomposition calls LAPACK, which can wait for ever when several CPU devices share the cores.
    """
    matrix = normal.reshape(-1, normal.shape[-1])
    if wide := matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T
    # A normal matrix has singular values up to about this; below sqrt(3) of it, all go to 1.
    largest = sum(size**0.5 for size in matrix.shape)

    def step(_: Array, x: Array) -> Array:
        return 1.5 * x - 0.5 * jnp.matmul(
            x, jnp.matmul(x.T, x, precision="highest"), precision="highest"
        )

    matrix = jax.lax.fori_loop(0, 40, step, matrix / largest)
    return (matrix.T if wide else matrix).reshape(normal.shape)
