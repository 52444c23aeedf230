"""Scans of accelerators, which are to compute what `jax.lax.scan` does, from fewer arrays."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from iterations import jit, setup_and_state
from probes import Bits

from purejaxppo import envs, ppo, scans
from purejaxppo.config import Hyper
from purejaxppo.train import make_setup

N = 5


@pytest.fixture
def accelerator(monkeypatch):
    """As if there were one, whose branches a CPU can take as well."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def start():
    """What a rollout may carry: of each environment numbers of all kinds, and arrays."""
    keys = jax.random.split(jax.random.key(0), N)
    return {
        "key": keys,
        "flag": jnp.arange(N) % 2 == 0,
        "count": jnp.arange(N) - 2,
        "bits": jax.random.bits(keys[0], (N,)),
        "real": jnp.array([0.5, -0.0, jnp.nan, jnp.inf, 1e-40]),
        "byte": jnp.arange(N, dtype=jnp.uint8),
        "image": jnp.arange(N * 6, dtype=jnp.float32).reshape(N, 2, 3),
        "slots": jnp.arange(2 * N * 6, dtype=jnp.int32).reshape(2, N, 2, 3),
        "index": jnp.int32(0),
        "nothing": None,
    }


def step(carry, x):
    after = carry | {
        "flag": ~carry["flag"],
        "count": carry["count"] + carry["flag"],
        "bits": carry["bits"] ^ 7,
        "real": jnp.where(carry["flag"], carry["real"], carry["real"] + x),
        "image": carry["image"] + x[:, None, None],
        "slots": carry["slots"].at[1].add(1),
        "index": carry["index"] + 1,
    }
    return after, (carry, x > 0, carry["image"].sum((1, 2)))


INPUTS = np.random.default_rng(0).normal(size=(40, N)).astype(np.float32)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("scan", "options", "as_jax"),
    [
        (scans.light_scan, {}, {}),
        (scans.light_scan, {"reverse": True}, {"reverse": True}),
        (scans.packed_scan, {}, {}),
        (scans.packed_scan, {"shape": (N,)}, {}),
        (scans.vector_scan, {"size": N}, {}),
    ],
)
def test_scans_give_what_that_of_jax_does(scan, options, as_jax):
    """Bit for bit, types too."""
    expected = jax.lax.scan(step, start(), INPUTS, **as_jax)
    found = scan(step, start(), INPUTS, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.usefixtures("accelerator")
def test_another_type_is_no_carry():
    """Which packed would be read as it never was."""

    def changes(carry, x):
        after, outputs = step(carry, x)
        return after | {"count": after["count"].astype("float32")}, outputs

    with pytest.raises(AssertionError, match="float32"):
        scans.vector_scan(changes, start(), INPUTS, N)


def loop(scan):
    """The equation that it is."""
    (found,) = (e for e in jax.make_jaxpr(scan)().eqns if e.primitive.name == "scan")
    return found


def arrays(scan):
    """How many the loop carries, of those that change, and puts out, together."""
    return len(loop(scan).outvars)


def test_rows_between_steps_are_of_one_environment_each():
    """Asterix takes twice as long where the final observations of all are one row."""
    vector = loop(lambda: scans.vector_scan(step, start(), INPUTS, N))
    assert {x.aval.shape for x in vector.outvars} >= {(N, 6), (2 * N, 6)}


def test_cpus_keep_arrays_apart(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert arrays(lambda: scans.vector_scan(step, start(), INPUTS, N)) == 7 + 11


@pytest.mark.usefixtures("accelerator")
def test_numbers_of_environments_are_one_array():
    """Beside it the image, the slots and the index, and of the outputs the keys and bytes."""
    assert arrays(lambda: jax.lax.scan(step, start(), INPUTS)) == 7 + 11
    assert arrays(lambda: scans.vector_scan(step, start(), INPUTS, N)) == 4 + 6


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (
            envs.make("MountainCarContinuous-v0"),
            {"normalize_rewards": True, "recompute_advantages": True},
        ),
        (Bits(), {}),
        (envs.make("CartPole-v1"), {"gru_units": 4, "num_steps": 40}),
    ],
)
def test_iterations_as_on_an_accelerator(env, options, monkeypatch):
    """All its branches at once, of two runs side by side: what is learned differs by rounding."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    setup, state, hyper = setup_and_state(env, Hyper(target_kl=0.05), **options)
    state, hyper = jax.tree.map(lambda x: jnp.stack([x, x]), (state, hyper))
    runs = state, hyper.replace(learning_rate=hyper.learning_rate * jnp.array([1.0, 2.0]))

    def both(setup):
        def iterations(state, hyper):
            return jax.vmap(lambda *run: ppo.iterate(setup, *run, 10.0))(state, hyper)

        traced = jit(iterations).trace(*runs)
        return traced.lower().compile()(*runs), str(traced.jaxpr)

    expected, on_cpu = both(setup)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found, on_gpu = both(make_setup(setup.config, env))
    assert on_gpu != on_cpu
    chex.assert_trees_all_close(found[1], expected[1], rtol=2e-3, atol=1e-5)
    chex.assert_trees_all_close(found[0].params, expected[0].params, rtol=0, atol=2e-4)
