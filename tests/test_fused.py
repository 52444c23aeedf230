"""Dense layers as one kernel, interpreted here: the layers, a network, and what a GPU is given."""

import itertools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from iterations import apply, jit

from purejaxppo import cli
from purejaxppo.agent import make_agent
from purejaxppo.config import Config, Hyper
from purejaxppo.effort import each_equation
from purejaxppo.fused import fused_layers
from purejaxppo.spaces import Box


def layer_by_layer(x, weights, activation):
    *hidden, (kernel, bias) = weights
    for w, b in hidden:
        x = {"tanh": jnp.tanh, "swish": jax.nn.swish}[activation](x @ w + b)
    return x @ kernel + bias


def numbers(runs, samples, widths):
    """Of each run: x, weights of layers of these widths, and a gradient of what comes out."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.float32(rng.normal(size=(*runs, *shape)))  # noqa: E731
    weights = [(normal(p, f) / p**0.5, normal(f)) for p, f in itertools.pairwise(widths)]
    return normal(samples, widths[0]), weights, normal(samples, widths[-1])


def with_gradients(layers, activation, runs):
    def function(x, weights, grad):
        y, pull_back = jax.vjp(lambda x, weights: layers(x, weights, activation), x, weights)
        return y, *pull_back(grad)

    for _ in runs:
        function = jax.vmap(function)
    return jit(function)


@pytest.mark.parametrize(
    ("activation", "runs", "samples", "widths"),
    [
        ("tanh", (), 5, (4, 64, 64, 2)),
        ("tanh", (2, 3), 32, (4, 8, 1)),
        ("swish", (2,), 300, (3, 20, 7, 2)),  # in three blocks, the last of which is not full
        ("tanh", (), 40, (200, 100, 64, 3)),  # the first layer does not fit
    ],
)
def test_layers_and_their_gradients(activation, runs, samples, widths):
    given = numbers(runs, samples, widths)
    ours = with_gradients(fused_layers, activation, runs)(*given)
    expected = with_gradients(layer_by_layer, activation, runs)(*given)
    chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_second_derivatives():
    """Of a gradient penalty, as an auxiliary loss may be."""
    x, weights, grad = numbers((2,), 20, (4, 8, 2))

    def with_penalty(layers):
        def penalty(weights, x, grad):
            slope = jax.grad(lambda x: jnp.sum(grad * layers(x, weights, "tanh")))(x)
            of_weights = jax.grad(lambda w: jnp.sum(grad * layers(x, w, "tanh")))(weights)
            return jnp.sum(slope**2) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(of_weights))

        return jit(jax.vmap(jax.grad(penalty)))(weights, x, grad)

    ours, expected = with_penalty(fused_layers), with_penalty(layer_by_layer)
    chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_observations_need_no_gradient():
    x, weights, grad = numbers((2,), 40, (4, 8, 2))

    def of_weights(x, weights, grad):
        _, pull_back = jax.vjp(lambda weights: fused_layers(x, weights, "tanh"), weights)
        return pull_back(grad)

    program = jax.make_jaxpr(jax.vmap(of_weights))(x, weights, grad)
    kernels = [each for each, _ in each_equation(program) if each.primitive.name == "pallas_call"]
    shapes = [[out.aval.shape for out in kernel.outvars] for kernel in kernels]
    assert [len(outs) for outs in shapes] == [1, 4]  # of both layers, kernel and bias
    *_, expected = with_gradients(layer_by_layer, "tanh", (2,))(x, weights, grad)
    (ours,) = jit(jax.vmap(of_weights))(x, weights, grad)
    chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="CPUs have neither TF32 nor its tanh")
@pytest.mark.parametrize(("runs", "samples"), [((64,), 128), ((64,), 4), ((), 300)])
def test_with_tf32_it_is_as_exact_as_that(runs, samples):
    given = numbers(runs, samples, (4, 64, 64, 2))
    expected = with_gradients(layer_by_layer, "tanh", runs)(*given)
    with jax.default_matmul_precision("default"):
        ours = with_gradients(fused_layers, "tanh", runs)(*given)
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        assert jnp.linalg.norm(one - other) < 2e-3 * jnp.linalg.norm(other)


def test_runs_that_share_their_weights():
    x, weights, _ = numbers((), 12, (4, 8, 2))
    each = jit(jax.vmap(lambda x: fused_layers(x, weights, "tanh")))(x.reshape(3, 4, 4))
    expected = layer_by_layer(x, weights, "tanh")
    np.testing.assert_allclose(each.reshape(12, 2), expected, rtol=1e-4, atol=1e-5)


def test_as_many_of_the_last_layers_as_fit():
    def kernels(*widths):
        """How many there are, and products outside of them."""
        x, weights, _ = numbers((), 2, widths)
        program = str(jax.make_jaxpr(lambda x: fused_layers(x, weights, "tanh"))(x))
        return program.count("pallas_call["), program.count("name=multiply")

    assert kernels(64, 64, 3) == (1, 0)
    assert kernels(64, 64, 64, 64, 3) == (1, 2)
    assert kernels(600, 513, 18) == (0, 2)
    assert kernels(513, 64, 64, 18) == (1, 1)
    assert kernels(513, 18) == (0, 1)  # a head alone


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared_torso": True, "policy_layers": (16,)},
        {"log_std": "state"},
        {"gru_units": 8, "value_layers": (16, 16)},
    ],
)
def test_a_network_is_the_same_but_for_rounding(options):
    spaces = Box(-1.0, 1.0, (3,)), Box(-1.0, 1.0, (2,))
    ours, expected = (
        make_agent(Config(dense=dense, torso_layers=(16,), **options), *spaces)
        for dense in ("fused", "xla")
    )
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(expected.init, jax.random.key(0), Hyper())
    params = jax.tree.map(lambda leaf: jnp.float32(rng.normal(0, 0.5, leaf.shape)), shapes)
    obs, first = jnp.float32(rng.normal(size=(5, 3))), jnp.ones(5, bool)
    given = params, None, obs, expected.init_carry(5), first
    for agent, kernels in ((ours, True), (expected, False)):
        program = str(jax.make_jaxpr(lambda agent=agent: agent.apply(*given))())
        assert ("pallas_call" in program) == kernels
    outputs = (apply(agent, *given) for agent in (ours, expected))
    chex.assert_trees_all_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="compiles Triton's code already to lower it, for a GPU"
)
@pytest.mark.parametrize(("precision", "rough"), [("highest", False), ("default", True)])
def test_a_gpu_is_given_one_kernel_and_one_for_the_gradient(precision, rough, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device("NVIDIA A100", "8.0")])
    with jax.default_matmul_precision(precision):
        function = with_gradients(fused_layers, "tanh", (2,))
        traced = function.trace(*numbers((2,), 128, (4, 64, 64, 2)))
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 2
    assert "stablehlo.dot_general" not in lowered
    assert ("tanh.approx.f32" in lowered) == rough


def device(kind, capability):
    return SimpleNamespace(device_kind=kind, compute_capability=capability)


@pytest.mark.parametrize(
    ("there", "precision", "fuses"),
    [
        (device("NVIDIA H200", "9.0"), "default", True),
        (device("NVIDIA H200", "9.0"), "tensorfloat32", True),
        (device("NVIDIA H200", "9.0"), "high", True),
        (device("NVIDIA H200", "9.0"), "highest", False),
        (device("NVIDIA H200", "9.0"), "float32", False),
        (device("NVIDIA T4", "7.5"), "default", False),
        (device("AMD Instinct MI300X", "gfx942"), "default", False),
        (device("cpu", None), "default", False),
    ],
)
def test_where_products_are_of_tf32_small_layers_are_fused(there, precision, fuses, monkeypatch):
    agent = make_agent(Config(torso_layers=(16,)), Box(-1.0, 1.0, (3,)), Box(-1.0, 1.0, (2,)))
    params = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape),
        jax.eval_shape(agent.init, jax.random.key(0), Hyper()),
    )
    given = params, None, jnp.zeros((5, 3)), agent.init_carry(5), jnp.ones(5, bool)
    monkeypatch.setattr(jax, "devices", lambda: [there])
    with jax.default_matmul_precision(precision):
        program = str(jax.make_jaxpr(lambda: agent.apply(*given))())
    assert ("pallas_call" in program) == fuses


def test_not_for_tpus(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert cli.train_command(["--dense", "fused"]) == 2
    assert "--dense fused: these kernels are for GPUs" in capsys.readouterr().err
