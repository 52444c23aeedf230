"""The product of all layers against numpy, its gradients against those of the plain one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import products
from purejaxppo.products import multiply


@pytest.mark.parametrize(("backend", "wide"), [("cpu", False), ("cpu", True), ("gpu", False)])
@pytest.mark.parametrize(
    ("steps", "inputs", "features"),
    [(5, 3, 8), (5, 8, 1), (5, 8, 4), (5, 8, 5), (1, 9, 9), (20, 30, 6)],
)
def test_products_and_their_gradients(monkeypatch, backend, wide, steps, inputs, features):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(products, "has_avx512", lambda: wide)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, 4, inputs)).astype(np.float32)
    kernel = rng.normal(size=(inputs, features)).astype(np.float32)
    weight = rng.normal(size=(steps, 4, features)).astype(np.float32)
    product, gradients = jax.vjp(multiply, x, kernel)
    np.testing.assert_allclose(product, x @ kernel, rtol=1e-5, atol=1e-6)
    of_x, of_kernel = gradients(jnp.asarray(weight))
    np.testing.assert_allclose(of_x, weight @ kernel.T, rtol=1e-5, atol=1e-6)
    expected = np.einsum("tnp,tnf->pf", x, weight)
    np.testing.assert_allclose(of_kernel, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("features", [2, 8])
def test_products_of_several_runs_are_those_of_each(features):
    rng = np.random.default_rng(1)
    x = jnp.float32(rng.normal(size=(3, 6, 5)))
    kernels = jnp.float32(rng.normal(size=(3, 5, features)))

    def gradients(x, kernel):
        return jax.grad(lambda *both: jnp.sum(jnp.sin(multiply(*both))), (0, 1))(x, kernel)

    alone = [gradients(*run) for run in zip(x, kernels, strict=True)]
    together = jax.vmap(gradients)(x, kernels)
    chex.assert_trees_all_close(
        together, jax.tree.map(lambda *runs: jnp.stack(runs), *alone), rtol=1e-5, atol=1e-6
    )
