"""All lowerings of a convolution give what flax.linen.Conv does, and which one is taken."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import convolutions
from purejaxppo.convolutions import (
    Conv,
    convolve_few,
    convolve_patches,
    convolve_winograd,
    convolve_xla,
)


@pytest.mark.parametrize(
    ("shape", "features", "size", "stride"),
    [
        ((10, 10, 4), 16, 3, 1),
        ((20, 20, 3), 8, 8, 4),
        ((21, 17, 3), 8, 4, 2),  # a last row and column that no kernel reaches
        ((13, 14, 2), 5, 5, 3),  # a kernel that is no multiple of its stride
        ((9, 9, 2), 5, 2, 3),  # pixels between kernels
        ((4, 4, 1), 3, 4, 1),
        ((9, 10, 3), 5, 3, 1),
        ((2, 2, 3), 5, 2, 1),  # less than a tile
    ],
)
def test_convolutions_are_those_of_flax(shape, features, size, stride):
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.normal(size=(2, 3, *shape)))
    flax = nn.Conv(features, (size, size), stride, "VALID", precision="highest")
    params = flax.init(jax.random.key(0), x)
    weight = jnp.float32(rng.normal(size=flax.apply(params, x).shape))

    @functools.partial(jax.jit, static_argnums=0)
    def results(apply):
        def loss(params, x):
            out = apply(params, x)
            return jnp.sum(weight * jnp.tanh(out)), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return out, grads

    def apply_with(convolve, params, x):
        layer = params["params"]
        return convolve(x, layer["kernel"], stride) + layer["bias"]

    ways = [convolve_few, convolve_patches, convolve_xla]
    if -(-size // stride) in (2, 3):
        ways.append(convolve_winograd)
    expected = results(flax.apply)
    for convolve in ways:
        ours = functools.partial(apply_with, convolve)
        actual = results(ours)
        if convolve is convolve_few:  # whose gradient is of another function
            np.testing.assert_allclose(jax.jit(ours)(params, x), expected[0], rtol=1e-4, atol=2e-5)
        chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_bits_are_convolved_as_numbers(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.random((2, 5, 10, 10, 4)) < 0.3)
    kernel = jnp.float32(rng.normal(size=(3, 3, 4, 16)))

    def loss(kernel, x, convolve):
        return jnp.sum(jnp.tanh(convolve(x, kernel, 1)))

    def with_gradient(convolve, x):
        return jax.jit(jax.value_and_grad(lambda *args: loss(*args, convolve)))(kernel, x)

    expected = with_gradient(convolve_xla, jnp.float32(x))
    for convolve in (convolve_few, convolve_patches, convolve_winograd, convolve_xla):
        found = with_gradient(convolve, x)
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("backend", "dtype", "last"),
    [
        ("cpu", "bool", "float32"),
        ("cpu", "uint8", "float32"),
        ("gpu", "bool", "bool"),
        ("gpu", "uint8", "uint32"),  # words of four bytes
        ("gpu", "float32", "float32"),
    ],
)
def test_patches_become_numbers_within_the_product_on_gpus(monkeypatch, backend, dtype, last):
    """What the last barrier lets through is what a device writes down."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x, kernel = jnp.zeros((2, 10, 10, 4), dtype), jnp.zeros((3, 3, 4, 16))
    jaxpr = jax.make_jaxpr(functools.partial(convolve_patches, stride=1))(x, kernel)
    barriers = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    assert barriers[-1].outvars[0].aval.dtype == last


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("channels", [3, 4])
def test_bytes_of_several_runs_are_convolved_alike(monkeypatch, backend, channels):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 256, (2, 5, 20, 17, channels)), jnp.uint8)
    kernels = jnp.float32(rng.normal(size=(2, 4, 4, channels, 6)))
    alone = [convolve_xla(run / 255.0, kernel, 2) for run, kernel in zip(x, kernels, strict=True)]
    for convolve in (convolve_few, convolve_patches, convolve_winograd, convolve_xla):
        together = jax.jit(jax.vmap(lambda *run, convolve=convolve: convolve(*run, 2)))(x, kernels)
        np.testing.assert_allclose(together, jnp.stack(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "convolution", "shape", "layer", "expected"),
    [
        ("cpu", "auto", (32, 84, 84, 4), (32, 8, 4), convolve_winograd),
        ("cpu", "auto", (4, 8, 20, 20, 32), (64, 4, 2), convolve_winograd),
        ("cpu", "auto", (32, 9, 9, 64), (64, 3, 1), convolve_winograd),
        ("cpu", "auto", (8, 9, 9, 64), (64, 3, 1), convolve_patches),
        ("cpu", "auto", (8, 20, 20, 32), (64, 4, 2), convolve_few),
        ("cpu", "auto", (8, 20, 20, 6), (64, 4, 2), convolve_patches),
        ("cpu", "auto", (32, 6, 9, 64), (64, 3, 1), convolve_patches),  # 4 x 7 positions
        ("cpu", "auto", (32, 9, 9, 64), (64, 1, 1), convolve_patches),
        ("cpu", "auto", (32, 9, 9, 64), (64, 4, 1), convolve_patches),
        ("cpu", "auto", (32, 10, 10, 6), (16, 3, 1), convolve_patches),
        ("cpu", "patches", (32, 9, 9, 64), (64, 3, 1), convolve_patches),
        ("cpu", "xla", (32, 9, 9, 64), (64, 3, 1), convolve_xla),
        ("gpu", "auto", (32, 9, 9, 64), (64, 3, 1), convolve_patches),
        ("gpu", "auto", (0, 9, 9, 64), (64, 3, 1), convolve_xla),
        ("tpu", "auto", (32, 9, 9, 64), (64, 3, 1), convolve_xla),
    ],
)
def test_the_fastest_convolution_is_taken(
    monkeypatch, backend, convolution, shape, layer, expected
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    taken = []
    for way in (convolve_few, convolve_patches, convolve_winograd, convolve_xla):
        monkeypatch.setattr(
            convolutions, way.__name__, lambda *_, way=way: taken.append(way) or 0.0
        )
    Conv(*layer, convolution).init(jax.random.key(0), jnp.zeros(shape))
    assert taken == [expected]
