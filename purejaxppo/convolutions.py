"""Convolutions as what the device computes fastest."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import sequential_vmap

from purejaxppo.products import multiply

CnnLayers = tuple[tuple[int, int, int], ...]  # (features, kernel, stride) of each

# Mnih et al. (2015), Mnih et al. (2013), and Young & Tian (2019).
CNN_LAYERS: dict[str, CnnLayers] = {
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "nips": ((16, 8, 4), (32, 4, 2)),
    "minatar": ((16, 3, 1),),
    "flat": (),
}


class Conv(nn.Module):
    """A convolution without padding, with the parameters of `flax.linen.Conv`."""

    features: int
    size: int
    stride: int
    convolution: Literal["auto", "patches", "xla"]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """X [..., H, W, C], which may be bytes or bits -> [..., H', W', features]."""
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if self.convolution == "auto":
            convolve = fastest(x, kernel, self.stride)
        else:
            convolve = convolve_patches if self.convolution == "patches" else convolve_xla
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
    images = _in_float(x).reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    layout = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        images, kernel, (stride, stride), "VALID", None, None, layout
    )
    return out.reshape(*x.shape[:-3], *out.shape[1:])


def fastest(x: Array, kernel: Array, stride: int) -> Callable[[Array, Array, int], Any]:
    """The convolution of images [..., H, W, C] with a kernel [k, k, C, F] that is fastest here.

    Winograd's filters need many images, channels and positions: their products are many and small. On an
    H100 patches are 1.9 times as fast as XLA for one run of MinAtar, 5 times for 16 and as fast for one of Atari.
    """
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu") or not math.prod(x.shape[:-3]):
        return convolve_xla
    if backend == "gpu":
        return convolve_patches
    channels = min(stride**2 * kernel.shape[2], kernel.shape[3])
    if channels < 32 or min(_positions(x, kernel, stride)) <= 4:
        return convolve_patches
    if math.prod(x.shape[:-3]) < 32:
        return convolve_few if stride > 1 else convolve_patches
    return convolve_winograd if _span(kernel, stride) in _KERNEL else convolve_patches


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_few(x: Array, kernel: Array, stride: int) -> Array:
    """What `convolve_xla` gives, by it, where no gradient is asked for: as in a rollout.

    Of the few images there it is faster than patches, which the gradient is taken of. Several runs
    are convolved one after another: as one convolution of groups they would take far longer.
    """
    return sequential_vmap(functools.partial(convolve_xla, stride=stride))(x, kernel)


def _few_forward(x: Array, kernel: Array, stride: int) -> tuple[Array, Callable]:
    return jax.vjp(functools.partial(convolve_patches, stride=stride), x, kernel)


def _few_backward(_: int, gradients: Callable, grad: Array) -> tuple[Array, Array]:
    return gradients(grad)


convolve_few.defvjp(_few_forward, _few_backward)


def convolve_patches(x: Array, kernel: Array, stride: int) -> Array:
    """What `convolve_xla` gives, as one matrix product over patches.

    Inside a scan on a CPU, where all of a training is, this is several times faster. Bytes become
    numbers last; without the barriers that is a tenth slower. On accelerators they do, and bits, within
    the product, which then reads a quarter.
    """
    on_cpu, span = jax.default_backend() == "cpu", _span(kernel, stride)
    if on_cpu and x.dtype == bool:  # faster there than patches of bits
        x = _in_float(x)
    height, width = _positions(x, kernel, stride)
    x, kernel = _in_blocks(x, kernel, stride, (height + span - 1, width + span - 1))
    offsets = itertools.product(range(span), repeat=2)
    patches = [x[..., i : i + height, j : j + width, :] for i, j in offsets]
    x = jnp.concatenate(patches, axis=-1)
    numbers = _barrier(_in_float(x)) if on_cpu else _in_float(_barrier(x))
    return multiply(numbers, kernel.reshape(-1, kernel.shape[-1]))


# Winograd's filters F(5 - r, r) of r weights, at the points 0, 1, -1 and infinity: 4 products give
# 5 - r results, of inputs, weights and products added up as the rows of these matrices say.
_INPUT = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1))
_KERNEL = {
    2: ((1, 0), (0.5, 0.5), (0.5, -0.5), (0, 1)),
    3: ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
}
_RESULT = {2: ((1, 1, 1, 0), (0, 1, -1, 0), (0, 1, 1, 1)), 3: ((1, 1, 1, 0), (0, 1, -1, 1))}


def convolve_winograd(x: Array, kernel: Array, stride: int) -> Array:
    """What `convolve_xla` gives, with down to 0.44 of the multiplications (Lavin & Gray, 2016).

    The image is cut into tiles of 4 x 4 blocks that overlap. In each, 16 sums of blocks are
    multiplied by 16 sums of weights, and sums of the products are 3 x 3 or 2 x 2 results, of kernels
    that cover 2 x 2 or 3 x 3 blocks. It pays where there are so many channels that sums cost little
    beside products.
    """
    span = _span(kernel, stride)
    height, width = _positions(x, kernel, stride)
    tile = 5 - span
    tiles = [-(-side // tile) for side in (height, width)]
    sides = [(n + 1) * tile for n in tiles]
    batch = x.shape[:-3]
    x, kernel = _in_blocks(x, kernel, stride, sides)
    images = _in_float(x).reshape(-1, *sides, kernel.shape[2])
    strips = jnp.stack(_tiles(images, tile, axis=1))
    inputs = jnp.stack([x.reshape(4, -1, x.shape[-1]) for x in _tiles(strips, tile, axis=3)])
    matrix = jnp.array(_KERNEL[span], kernel.dtype)
    weights = jnp.einsum("ij,kl,jlcf->kicf", matrix, matrix, kernel)
    products = jax.vmap(jax.vmap(multiply))(*_barrier((inputs, weights)))
    products = products.reshape(4, 4, len(images), *tiles, -1)
    rows = [_sums(_RESULT[span], jnp.unstack(column)) for column in jnp.unstack(products)]
    cells = [jnp.stack(_sums(_RESULT[span], row), axis=3) for row in zip(*rows, strict=True)]
    out = jnp.stack(cells, axis=2).reshape(len(images), *(n * tile for n in tiles), -1)
    return out[:, :height, :width].reshape(*batch, height, width, -1)


def _tiles(x: Array, tile: int, axis: int) -> list[Array]:
    """4 arrays [..., n, ...], the sums of inputs of n tiles, of x [..., (n + 1) * tile, ...]."""
    shape = (*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    parts = jnp.unstack(x.reshape(shape), axis=axis + 1)
    own = [jax.lax.slice_in_dim(part, 0, -1, axis=axis) for part in parts]
    next_ones = [jax.lax.slice_in_dim(part, 1, None, axis=axis) for part in parts[: 4 - tile]]
    return _sums(_INPUT, own + next_ones)


def _sums(matrix: Sequence[Sequence[float]], parts: Sequence[Array]) -> list[Array]:
    """For each row of a matrix the parts added up with its weights."""
    sums = []
    for row in matrix:
        terms = [weight * part for weight, part in zip(row, parts, strict=True) if weight]
        sums.append(functools.reduce(jnp.add, terms))
    return sums


def _span(kernel: Array, stride: int) -> int:
    """Blocks of stride x stride pixels that a kernel [k, k, C, F] covers in a row."""
    return -(-len(kernel) // stride)


def _positions(x: Array, kernel: Array, stride: int) -> tuple[int, int]:
    """H' and W', how often the kernel [k, k, C, F] fits images [..., H, W, C]."""
    height, width = ((side - len(kernel)) // stride + 1 for side in x.shape[-3:-1])
    return height, width


def _in_blocks(x: Array, kernel: Array, stride: int, sides: Sequence[int]) -> tuple[Array, Array]:
    """Images [..., *sides, S] and a kernel [r, r, S, F] that need no stride to give the same.

    Blocks of stride x stride pixels become channels. Images are cut, or filled up with zeros, to
    `sides` blocks. Bytes are moved, and given back, as words of four where channels allow it.
    """
    if x.dtype == jnp.uint8 and x.shape[-1] % 4 == 0:
        x = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.uint32)
    batch = x.shape[:-3]
    for axis, side in zip((x.ndim - 3, x.ndim - 2), sides, strict=True):
        x = _resized(x, axis, side * stride)
    x = x.reshape(*batch, sides[0], stride, sides[1], stride, -1)
    x = _barrier(jnp.swapaxes(x, -4, -3).reshape(*batch, *sides, -1))
    span = _span(kernel, stride)
    for axis in (0, 1):
        kernel = _resized(kernel, axis, span * stride)
    kernel = kernel.reshape(span, stride, span, stride, *kernel.shape[2:]).swapaxes(1, 2)
    return x, kernel.reshape(span, span, -1, kernel.shape[-1])


_barrier = jax.lax.optimization_barrier


def _in_float(x: Array) -> Array:
    """Bytes, or words of four, as 0 ... 1, bits as 0 and 1, other numbers as they are."""
    if x.dtype == jnp.uint32:
        x = jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)
    if x.dtype == bool:
        return x.astype(jnp.float32)
    return x.astype(jnp.float32) / 255.0 if x.dtype == jnp.uint8 else x


def _resized(x: Array, axis: int, size: int) -> Array:
    """X cut, or filled up with zeros, to `size` along an axis."""
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
