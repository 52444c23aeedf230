"""Which programs are compiled quickly, and that they compute the same."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import checkpoint, cli
from purejaxppo.activations import tanh
from purejaxppo.config import Config, Hyper, RunOptions, read_settings
from purejaxppo.display import Display
from purejaxppo.effort import compiler_options, each_equation, quick_below
from purejaxppo.envs import load_settings
from purejaxppo.fused import fused_layers
from purejaxppo.loop import Training
from purejaxppo.machine import Memory
from purejaxppo.products import multiply
from purejaxppo.program import Program
from purejaxppo.sweep import Setting, make_runs, make_settings_of
from purejaxppo.train import make_setup

MEMORY = Memory(2**30, per_device=False)


def traced(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).trace(*arguments).jaxpr.jaxpr


def numbers(jaxpr):
    """How often each kind of equation is computed."""
    return {e.primitive.name: times for e, times in each_equation(jaxpr)}


def test_what_scans_repeat_is_counted_as_often():
    def inner(x, _):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x), jnp.cos(x)

    found = numbers(traced(lambda x: jax.lax.scan(inner, x, length=5), (7,)))
    assert found["sin"] == 15
    assert found["cos"] == 5


def test_small_programs_are_quick_until_they_are_called_often():
    jaxpr = traced(lambda x: jnp.sin(x) + 1, (1000,))  # two equations, 2,000 numbers
    assert quick_below(jaxpr) == 500


def test_an_activation_is_one_equation():
    jaxpr = traced(lambda x: jnp.sin(tanh(x)), (7,))
    assert [e.primitive.name for e, _ in each_equation(jaxpr)] == ["custom_jvp_call", "sin"]


def test_products_do_not_count():
    jaxpr = traced(lambda x: x @ x, (4000, 4000))
    assert [e.primitive.name for e, _ in each_equation(jaxpr)] == ["dot_general"]
    assert quick_below(jaxpr) == math.inf


def test_gpus_count_operations_of_products(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    product = traced(lambda x, y: jnp.sin(x) @ y, (30, 20), (20, 10))
    assert quick_below(product) == 4e13 / (2 * 30 * 20 * 10)

    def steps(x, y):  # each a product forward, and two backward
        loss = jax.grad(lambda x, y: multiply(x, y).sum(), argnums=(0, 1))
        return jax.lax.scan(lambda *_: (x, jax.vmap(loss)(x, y)), x, length=7)

    operations = 7 * 3 * (2 * 5 * 30 * 20 * 10)
    assert quick_below(traced(steps, (5, 30, 20), (5, 20, 10))) == 4e13 / operations
    images = traced(
        lambda x, y: jax.lax.conv_general_dilated(
            x, y, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (5, 8, 8, 3),
        (4, 4, 3, 7),
    )
    assert quick_below(images) == 4e13 / (2 * (5 * 3 * 3 * 7) * (4 * 4 * 3))
    assert quick_below(traced(jnp.sin, (30,))) == math.inf


def test_fused_layers_have_no_kernels_to_be_tried(monkeypatch):
    def layers(x, *weights):
        return fused_layers(x, list(zip(weights[::2], weights[1::2], strict=True)), "tanh")

    jaxpr = traced(layers, (64, 4), (4, 8), (8,), (8, 2), (2,))
    assert "pallas_call" in numbers(jaxpr)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert quick_below(jaxpr) == math.inf


@pytest.mark.on_cpus
def test_quick_and_full_differ_by_rounding_alone(tmp_path, capsys):
    """After two iterations, and so that the option and not the length decides."""
    arguments = ["--env", "CartPole-v1", "--num-envs", "4", "--num-steps", "32", "--seed", "3"]
    arguments += ["--total-timesteps", "256", "--eval-episodes", "0"]
    found = {}
    for effort in ("auto", "quick", "full"):
        path = tmp_path / effort
        assert (
            cli.train_command([*arguments, "--compile-effort", effort, "--run-dir", str(path)]) == 0
        )
        assert ("quickly" in capsys.readouterr().out) == (effort != "full")
        found[effort] = checkpoint.load(path / "checkpoints" / "0").named("state.params")
    for name, full in found["full"].items():
        np.testing.assert_array_equal(found["auto"][name], found["quick"][name])
        np.testing.assert_allclose(found["quick"][name], full, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.on_cpus
@pytest.mark.parametrize(("before", "effort"), [(None, "quick"), ("full", "full")])
def test_what_goes_on_keeps_its_effort(before, effort):
    """Also where a run of a sweep is extracted, whose program alone would be quick."""
    config = Config(num_envs=2, num_steps=16, num_minibatches=2, total_timesteps=32)
    runs = make_runs([Setting({}, config, Hyper())], RunOptions())
    program = Program(RunOptions(), runs, MEMORY, effort=before)
    assert program.effort == effort


@pytest.mark.parametrize(("saved_on", "effort"), [(None, "full"), ("another", "quick")])
def test_another_device_decides_anew(trained, saved_on, effort):
    settings = read_settings(file=trained / "config.yaml")
    found = checkpoint.load(trained / "checkpoints" / "0")
    assert found.facts["effort"] == "quick"
    found.facts.update(effort="full", device=saved_on or found.facts["device"])
    runs = make_runs(make_settings_of(settings), settings.run)
    training = Training(settings.run, runs, Display(quiet=True), MEMORY, found)
    assert training.program.effort == effort


def test_tpus_are_never_quick(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    config = Config(num_envs=2, num_steps=16, num_minibatches=2, total_timesteps=32)
    program = Program(RunOptions(), make_runs([Setting({}, config, Hyper())], RunOptions()), MEMORY)
    assert program.effort == "full"
    assert cli.train_command(["--env", "CartPole-v1", "--compile-effort", "quick"]) == 2
    assert "--compile-effort quick: only CPUs and GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "steps", "effort"),
    [
        ("auto", 32, "quick"),
        ("auto", 32_000_000, "full"),
        ("quick", 32_000_000, "quick"),
        ("full", 32, "full"),
    ],
)
def test_gpus_are_quick_where_little_is_computed(monkeypatch, asked, steps, effort):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = Config(
        num_envs=2, num_steps=16, num_minibatches=2, total_timesteps=steps, torso_layers=(999, 999)
    )
    options = RunOptions(compile_effort=asked)
    runs = make_runs([Setting({}, config, Hyper())], options)
    program = Program(options, runs, MEMORY)
    assert program.effort == effort
    assert program.evaluation_effort == ("full" if asked == "full" else "quick")
    setup = program.trainer.setup
    assert compiler_options(setup) == {}
    assert list(compiler_options(setup, quick=True)) == ["xla_gpu_autotune_level"]


@pytest.mark.on_cpus
@pytest.mark.parametrize(("env", "level"), [("CartPole-v1", 1), ("brax/inverted_pendulum", 3)])
def test_physics_in_lanes_is_compiled_with_all_effort(env, level):
    setup = make_setup(load_settings(env).config)
    assert compiler_options(setup)["xla_backend_optimization_level"] == level
    assert compiler_options(setup, quick=True)["xla_backend_optimization_level"] == 0


def test_xla_takes_the_option_of_gpus(monkeypatch):
    """That for CPUs does, too; what runs once is always quick."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = Config(num_envs=2, num_steps=16, num_minibatches=2, total_timesteps=32_000_000)
    options = RunOptions(compile_effort="full")
    program = Program(options, make_runs([Setting({}, config, Hyper())], options), MEMORY)
    init = program.trainer.init.lower(*program.start).compile()
    chex.assert_tree_all_finite(init(*program.start).params)
