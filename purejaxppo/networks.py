"""Policy and value networks: torsos x heads behind one call signature."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

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

CnnLayers = tuple[tuple[int, int, int], ...]  # (features, kernel, stride) of each

# Mnih et al. (2015), and Young & Tian (2019).
CNN_LAYERS: dict[str, CnnLayers] = {
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "minatar": ((16, 3, 1),),
    "flat": (),
}


class NetworkOutput(struct.PyTreeNode):
    """What an ActorCritic says about a batch of observations."""

    policy: Array  # [..., O] logits, or the mean of a Gaussian
    log_std: Array | None  # [..., A], None for discrete actions
    value: Array  # [...]
    carry: Any  # the torso's memory after this observation, () without one


class Conv(nn.Module):
    """A convolution without padding, with the parameters of `flax.linen.Conv`."""

    features: int
    size: int
    stride: int
    convolution: Literal["auto", "patches", "xla"]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """X [..., H, W, C], which may be bytes -> [..., H', W', features]."""
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        how = self.convolution
        if how == "auto":
            how = "patches" if jax.default_backend() == "cpu" else "xla"
        convolve = convolve_patches if how == "patches" else convolve_xla
        return convolve(x, kernel, self.stride) + bias


class ConvShape(NamedTuple):
    """What a convolution multiplies for one image."""

    positions: int  # of its kernel, H' * W'
    patch: int  # numbers under the kernel, k * k * C
    features: int


def conv_shapes(layers: CnnLayers, shape: tuple[int, ...]) -> list[ConvShape]:
    """Of convolutions one after another, of an image [H, W, C].

    Raises:
        ValueError: a kernel is larger than what it is applied to.
    """
    shapes = []
    for features, size, stride in layers:
        if len(shape) != 3 or min(shape[:2]) < size:
            raise ValueError(f"a kernel of {size} does not fit {list(shape)}")
        height, width, channels = shape
        shape = ((height - size) // stride + 1, (width - size) // stride + 1, features)
        shapes.append(ConvShape(shape[0] * shape[1], size * size * channels, features))
    return shapes


def convolve_xla(x: Array, kernel: Array, stride: int) -> Array:
    """[..., H', W', F] of x [..., H, W, C] and kernel [k, k, C, F], without padding.

    Bytes, 0 ... 255, stand for 0 ... 1.
    """
    images = _in_float(x).reshape(-1, *x.shape[-3:])
    layout = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), "VALID", None, None, layout
    )
    return out.reshape(*x.shape[:-3], *out.shape[1:])


def convolve_patches(x: Array, kernel: Array, stride: int) -> Array:
    """What `convolve_xla` gives, as one matrix product over patches.

    Inside a scan on a CPU, where all of a training is, this is several times faster. Blocks of
    stride x stride pixels become channels first, so that few slices make the patches, and bytes
    become numbers last. Without the barriers that is a tenth slower.
    """
    size, _, channels, features = kernel.shape
    height, width = ((side - size) // stride + 1 for side in x.shape[-3:-1])
    span = -(-size // stride)  # blocks that a kernel covers
    blocks = []
    for axis, count in ((x.ndim - 3, height + span - 1), (x.ndim - 2, width + span - 1)):
        x = _resized(x, axis, count * stride)
        blocks += [count, stride]
    batch = x.shape[:-3]
    x = jnp.swapaxes(x.reshape(*batch, *blocks, channels), -4, -3)
    x = _barrier(x.reshape(*batch, blocks[0], blocks[2], stride * stride * channels))
    patches = _patches(x, height, width, span)
    for axis in (0, 1):
        kernel = _resized(kernel, axis, span * stride)
    kernel = kernel.reshape(span, stride, span, stride, channels, features).swapaxes(1, 2)
    return _multiply(_barrier(_in_float(patches)), kernel.reshape(-1, features))


def _patches(x: Array, height: int, width: int, span: int) -> Array:
    """[..., height, width, span * span * C] of x [..., H, W, C], bytes moved four at a time."""
    in_words = x.dtype == jnp.uint8 and x.shape[-1] % 4 == 0
    if in_words:
        x = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.uint32)
    offsets = itertools.product(range(span), repeat=2)
    patches = jnp.concatenate(
        [x[..., i : i + height, j : j + width, :] for i, j in offsets], axis=-1
    )
    if in_words:
        patches = jax.lax.bitcast_convert_type(patches, jnp.uint8)
        patches = patches.reshape(*patches.shape[:-2], -1)
    return patches


_barrier = jax.lax.optimization_barrier


def _in_float(x: Array) -> Array:
    """Bytes as 0 ... 1, other numbers as they are."""
    return x.astype(jnp.float32) / 255.0 if x.dtype == jnp.uint8 else x


@jax.custom_vjp
def _multiply(x: Array, kernel: Array) -> Array:
    """[..., P] @ [P, F], of which CPUs take the gradient fast."""
    return x @ kernel


def _multiply_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _multiply_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    """The kernel's gradient, x.T @ grad, from a copy of one transposed.

    XLA on CPUs would rather multiply x's transpose as it lies, at half the speed. Of the two ways to
    avoid it the one that moves fewer numbers.
    """
    x, kernel = saved
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    if jax.default_backend() != "cpu":
        of_kernel = rows.T @ grads
    elif rows.size < grads.size + kernel.size:
        of_kernel = _barrier(rows.T) @ grads
    else:
        of_kernel = _barrier(_barrier(grads.T) @ rows).T
    return grad @ kernel.T, of_kernel


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _dense(features: int) -> nn.Dense:
    """A dense layer with the fast gradient."""
    return nn.Dense(features, dot_general=lambda x, kernel, *_, **__: _multiply(x, kernel))


def _resized(x: Array, axis: int, size: int) -> Array:
    """X cut, or filled up with zeros, to `size` along an axis."""
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


class Torso(nn.Module):
    """Convolutions, then dense layers, each followed by the activation."""

    cnn_layers: CnnLayers
    layers: tuple[int, ...]
    activation: str
    convolution: Literal["auto", "patches", "xla"]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """X [..., F], or [..., H, W, C] where there are convolutions."""
        activation = ACTIVATIONS[self.activation]
        for features, size, stride in self.cnn_layers:
            x = activation(Conv(features, size, stride, self.convolution)(x))
        if self.cnn_layers:
            x = x.reshape(*x.shape[:-3], -1)
        for width in self.layers:
            x = activation(_dense(width)(x))
        return x


class ActorCritic(nn.Module):
    """torso -> policy layers -> policy head, and torso -> value layers -> value head.

    Attributes:
        num_outputs: O of the policy head.
        log_std: None (discrete actions), "parameter", or "state" for a head of its own.
    """

    num_outputs: int
    cnn_layers: CnnLayers
    torso_layers: tuple[int, ...]
    policy_layers: tuple[int, ...]
    value_layers: tuple[int, ...]
    shared_torso: bool
    activation: str
    convolution: Literal["auto", "patches", "xla"]
    log_std: str | None

    def setup(self) -> None:
        """The torsos, then the layers and the head of each part."""
        cnn, dense = self.cnn_layers, self.torso_layers
        if self.shared_torso:
            self.torso = self._torso(cnn, dense)
            cnn, dense = (), ()
        self.policy = self._torso(cnn, dense + self.policy_layers)
        self.value = self._torso(cnn, dense + self.value_layers)
        self.policy_head = _dense(self.num_outputs)
        self.value_head = _dense(1)
        if self.log_std == "parameter":
            self.log_std_value = self.param("log_std", nn.initializers.zeros, (self.num_outputs,))
        elif self.log_std == "state":
            self.log_std_head = _dense(self.num_outputs)

    def num_units(self, shape: tuple[int, ...]) -> int:
        """Numbers that all layers hold for one observation of a shape, patches of images among them."""
        units = sum(self.torso_layers)
        for conv in conv_shapes(self.cnn_layers, shape):
            units += conv.positions * (conv.patch + conv.features)
        units *= 1 if self.shared_torso else 2
        return units + sum(self.policy_layers) + sum(self.value_layers) + self.num_outputs + 1

    def _torso(self, cnn_layers: CnnLayers, layers: tuple[int, ...]) -> Torso:
        return Torso(cnn_layers, layers, self.activation, self.convolution)

    def __call__(self, x: Array, carry: Any, first: Array) -> NetworkOutput:
        """X [..., F] or images [..., H, W, C], carry and first [...] for torsos with memory."""
        del first  # there is no memory to clear
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


def init_params(
    network: nn.Module, key: Array, example: tuple, policy_gain: Array, init_log_std: Array
) -> Any:
    """Orthogonal weights (Saxe et al., 2014) with PPO's usual gains, biases of zero.

    Gains are sqrt(2) for hidden layers, 1 for the value's head, policy_gain for the policy's and 0.01
    for that of a log-std; the log standard deviation starts at init_log_std.

    Args:
        network: whose `init(key, *example)` gives the shapes.
        key: consumed.
        policy_gain, init_log_std: [].
    """
    gains = {"value_head": 1.0, "policy_head": policy_gain, "log_std_head": 0.01}
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
