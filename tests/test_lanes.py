"""That a batch in the last axis computes what `jax.vmap` does, and that Brax's physics stays in that axis."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from purejaxppo import envs
from purejaxppo.effort import each_equation
from purejaxppo.envs import lanes
from purejaxppo.envs.brax import quietly
from purejaxppo.envs.lanes import batched_last

SIZE = 7


def moved(x, y):
    """What moves numbers to places known in advance."""
    part = lax.slice(x, (0, 1), (3, 4), (2, 1))
    turned = jnp.concatenate([part.T, y[:3, :1], jnp.ones((3, 1))], axis=1)
    filled = lax.pad(turned, 0.5, ((1, 0, 0), (0, 2, 1)))
    placed = filled.at[jnp.array([1, 3])].add(part[:1, :1]).at[0, 2].set(x[0, 0])
    taken = jnp.take(placed, jnp.array([2, 0, 2]), axis=0)
    rows = jnp.stack([x, y], axis=1), jnp.unstack(y, axis=1)
    return jnp.tile(taken.reshape(-1), 2), placed[:, None].squeeze(1), rows


def multiplied(x, y):
    """Products with an axis shared, several summed, none left, of what is not of the batch, of many terms and none."""
    shared = jnp.einsum("ijk,ilk->ijl", jnp.stack([x, x + 1]), jnp.stack([y, y]))
    many = jnp.tile(x, 9) @ jnp.tile(y, 9).T, x[:, :0] @ y[:, :0].T
    return shared, many, jnp.tensordot(x, y, 2), x @ jnp.arange(12.0).reshape(4, 3), x @ y.T @ x


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), None), lambda _, grad: (2 * grad,))


def elementwise(x, y):
    angle = jnp.arctan2(x, y) + jnp.clip(x, -0.5, y.sum())
    return (
        jnp.where(x.max() > 1, angle, x**2),
        jnp.isfinite(x).all(),
        jax.nn.relu(doubled(y)).astype(jnp.int32),
    )


def repeated(x, y):
    """Rows and constants of the batch and not, carried values that only become so."""
    rows = x, jnp.arange(3.0)

    def step(carry, row):
        mine, number = row
        total = carry[0] + mine @ y.T + number
        return (total, carry[1] * 2), (total.sum(), number)

    return lax.scan(step, (jnp.zeros(3), jnp.ones(2)), rows, reverse=True)


def reduced(x, y):
    """Over several axes, one, none, and one without numbers."""
    positive, numbers = x > 0, jnp.round(y).astype(jnp.int32)
    parts = [f(x) for f in (jnp.sum, jnp.max, jnp.min)] + [numbers.sum(), numbers.max(), x.max(1)]
    parts += [x.sum(()), x[:, :0].max(1, initial=2.0), x[:, :0].sum()]
    return parts, positive.all(), positive.any(), jnp.trace(x @ x.T)


def searching(x, y):
    """A loop of conditions that depend on the batch."""

    def step(total, row):
        more = lax.cond(total.sum() > 0, lambda: x @ y.T @ x, lambda: jnp.ones(x.shape))
        total = lax.while_loop(
            lambda z: z.sum() < 9, lambda z: z + (jnp.abs(y) @ jnp.abs(row))[:, None] + 1, total
        )
        return total / 2 + more, (more @ row).sum()

    return lax.scan(step, x, y)


def solving(x, y, length=5, idle=lambda total, count: (total, count, False)):
    """As JAXopt and MJX iterate, no more than `length` times."""

    def once_more(total, count):
        return total + jnp.abs(y), count + 1, total.sum() < 9

    def step(carry, _):
        *state, unfinished = carry
        return lax.cond(unfinished, once_more, idle, *state), None

    return lax.scan(step, (x, 0, x[0, 0] > 0), length=length)[0]


def bounded(x, y):
    """Loops that end early, of which none is needed, and of others whose steps always do something."""
    counting = solving(x, y, idle=lambda total, count: (total, count - 1, False))
    again = solving(x, y, idle=lambda total, count: (total, count, total[0, 0] < count))
    swapped = solving(x, y, idle=lambda total, count: (total.T.reshape(3, 4), count, False))
    return solving(x, y), solving(x, y, 0), solving(x, y, 30), counting, again, swapped


def branching(x, y):
    """Branches chosen by each one's own place, and by what is no part of the batch."""
    branches = [lambda z: z + 1, lambda z: jnp.sort(z) * y, lambda z: z.T.reshape(3, 4)]
    chosen = lax.switch(jnp.argmin(x) % 3, branches, x), jnp.argmax(y, axis=1)
    return chosen, lax.switch(jnp.arange(3).sum() % 2, branches, x)


def without_rules(x, y):
    """Places of each one's own."""
    place = jnp.argmax(x)
    return x.reshape(-1)[place], jnp.sort(y), x.at[place % 3].set(0.0), jnp.cumsum(y)


def of_keys(key, x):
    return jax.random.normal(key, x.shape) + x


CASES = [moved, multiplied, elementwise, repeated, reduced]
CASES += [searching, bounded, branching, without_rules]


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_it_computes_what_vmap_does(function, axes):
    shapes = [(SIZE, 3, 4) if axis == 0 else (3, 4) for axis in axes]
    arguments = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    expected = jax.vmap(function, axes)(*arguments)
    found = jax.jit(jax.vmap(batched_last(function), axes))(*arguments)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_keys_are_of_a_batch():
    arguments = jax.random.split(jax.random.key(0), SIZE), jnp.ones((SIZE, 3))
    found = jax.vmap(batched_last(of_keys))(*arguments)
    chex.assert_trees_all_equal(found, jax.vmap(of_keys)(*arguments))


@pytest.mark.parametrize("function", [multiplied, searching, bounded])
def test_batches_of_batches(function):
    x, y = (jax.random.normal(jax.random.key(i), (2, SIZE, 3, 4)) for i in range(2))
    found = jax.vmap(jax.vmap(batched_last(function), (0, None)))(x, y[:, 0])
    expected = jax.vmap(jax.vmap(function, (0, None)))(x, y[:, 0])
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_without_a_batch_it_is_the_function():
    x, y = (jax.random.normal(jax.random.key(i), (3, 4)) for i in range(2))
    chex.assert_trees_all_equal(batched_last(moved)(x, y), moved(x, y))


@pytest.mark.on_cpus
def test_sums_are_left_to_no_library(monkeypatch):
    """Which takes tens of microseconds for each."""

    def compiled():
        function = jax.vmap(batched_last(lambda x: ((x * x).sum(1), x @ x.T)))
        shape = jax.ShapeDtypeStruct((64, 10, 6), jnp.float32)
        return jax.jit(function).lower(shape).compile().as_text()

    assert "ynn" not in compiled()
    monkeypatch.setattr(lanes, "_sum", jnp.sum)
    assert "ynn" in compiled()


@pytest.mark.on_cpus
def test_sums_of_many_products_write_none_to_memory(monkeypatch):
    def compiled():
        function = jax.vmap(batched_last(lambda x, y: x @ y))
        shapes = (jax.ShapeDtypeStruct((64, *shape), jnp.float32) for shape in [(3, 49), (49, 2)])
        return jax.jit(function).lower(*shapes).compile().as_text()

    assert "reduce-window" not in compiled()
    monkeypatch.setattr(lanes, "_AT_ONCE", 49)
    assert "reduce-window" in compiled()


def turned(matrix, x, y):
    return matrix @ ((x - y) * x - (x - y * y) * y)


def crossed(matrix, x, y):
    del matrix
    return jnp.cross((x + y) * x + (x + y * y) * y, x)


def rotating(matrix, x, y):
    del matrix
    sine = jnp.sin(x.sum())
    return jnp.array([sine * y[0], sine * y[1], sine * y[2]])


@pytest.mark.on_cpus
@pytest.mark.parametrize(
    ("function", "inner", "outer"),
    [(turned, "subtract", "add"), (crossed, "add", "subtract"), (rotating, "sine", "concatenate")],
)
def test_what_a_kernel_reads_from_several_places_is_computed_before(
    monkeypatch, function, inner, outer
):
    arguments = jnp.ones((SIZE, 3, 3)), jnp.ones((SIZE, 3)), jnp.ones((SIZE, 3))

    def in_one_kernel():
        compiled = jax.jit(jax.vmap(batched_last(function))).lower(*arguments).compile().as_text()
        kernels = re.findall(r"%fused_computation.*?\n}", compiled, re.DOTALL)
        assert any(f" {outer}(" in x for x in kernels)
        return any(f" {outer}(" in x and f" {inner}(" in x for x in kernels)

    assert not in_one_kernel()
    monkeypatch.setattr(lanes, "_stored", lambda x: x)
    assert in_one_kernel()


@pytest.mark.on_cpus
@pytest.mark.parametrize(
    ("function", "stored"),
    [
        (lambda x, y: jnp.cross(x + y, y), 0),  # which takes as long to read as to compute
        (lambda x, y: jnp.cross((x + y) * (x * y) + x * y, y), 1),  # slices of the same
        (lambda x, y: (x * y).sum() * y[::-1], 0),  # not read again
        (lambda x, y: ((x * y).sum() * y)[1:], 1),
        (lambda x, y: jnp.outer(x, y).sum(), 1),  # one axis after another
        (lambda x, y: jnp.cross(jnp.sin(x), jnp.sin(y)), 2),
    ],
)
def test_what_is_read_again_is_stored_once_where_it_takes_long_to_compute(function, stored):
    x = jnp.ones((SIZE, 3))
    traced = jax.jit(jax.vmap(batched_last(function))).trace(x, x).jaxpr
    assert sum(e.primitive.name == "div" for e, _ in each_equation(traced)) == stored


@pytest.mark.on_cpus
@pytest.mark.parametrize(("name", "backend"), [("hopper", "spring"), ("ant", "positional")])
def test_physics_stays_in_the_last_axis(name, backend):
    """Each number of it, so that none is computed by another rule; and it is the same physics."""
    env = envs.make(f"brax/{name}", {"backend": backend})
    assert env.in_lanes
    keys = jax.random.split(jax.random.key(0), SIZE * 17)
    state, _ = jax.jit(jax.vmap(env.reset))(keys)
    action = jnp.full((len(keys), *env.action_space.shape), 0.3)
    step = jax.vmap(env.step)
    with quietly():
        traced = jax.jit(step).trace(keys, state, action).jaxpr
    inner = max(
        (e for e, _ in each_equation(traced) if e.primitive.name == "scan"),
        key=lambda e: len(e.params["jaxpr"].jaxpr.eqns),
    )
    shapes = [x.aval.shape for e, _ in each_equation(inner.params["jaxpr"]) for x in e.outvars]
    assert sum(shape[-1:] == (len(keys),) for shape in shapes) > 1000
    assert not any(len(keys) in shape[:-1] for shape in shapes)
    found, one = jax.tree.map(
        lambda x: x[0], (jax.jit(step)(keys, state, action), (keys, state, action))
    )
    chex.assert_trees_all_close(found, env.step(*one), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["generalized", "mjx"])
def test_physics_with_a_solver_is_the_same(backend):
    env = envs.make("brax/inverted_pendulum", {"backend": backend})
    keys = jax.random.split(jax.random.key(0), SIZE)
    state, _ = jax.vmap(env.reset)(keys)
    action = jnp.linspace(-1, 1, SIZE)[:, None]
    found = jax.jit(jax.vmap(env.step))(keys, state, action)
    step = jax.jit(env.step)
    for i in range(SIZE):
        expected = step(*jax.tree.map(lambda x, i=i: x[i], (keys, state, action)))
        one = jax.tree.map(lambda x, i=i: x[i], found)
        chex.assert_trees_all_close(one, expected, rtol=1e-3, atol=1e-3)


def test_a_loop_of_conditions_moves_nothing_in_each_step():
    x = jnp.ones((SIZE, 3, 4))
    traced = jax.jit(jax.vmap(batched_last(searching))).trace(x, x).jaxpr
    (loop,) = (e for e, _ in each_equation(traced) if e.primitive.name == "scan")
    inner = [e for e, _ in each_equation(loop.params["jaxpr"])]
    turns = [e.params["permutation"] for e in inner if e.primitive.name == "transpose"]
    assert "while" in [e.primitive.name for e in inner]
    assert turns
    assert all(turn[-1] == len(turn) - 1 for turn in turns)


@pytest.mark.parametrize(
    ("idle", "ends"),
    [
        (lambda total, count: (total, count, False), True),
        (lambda total, count: (total, count - 1, False), False),
        (lambda total, count: (total, count, True), False),
        (lambda total, count: (total, count, count > 2), False),
        (lambda total, count: (total * 2, count, False), False),
    ],
)
def test_a_loop_ends_when_its_steps_do_nothing_for_any(idle, ends):
    x = jnp.ones((SIZE, 3, 4))
    function = batched_last(functools.partial(solving, idle=idle))
    traced = jax.jit(jax.vmap(function)).trace(x, x).jaxpr
    found = [e.primitive.name for e, _ in each_equation(traced)]
    assert ("while" in found, "scan" in found) == (ends, not ends)
