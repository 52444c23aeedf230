"""`jax.vmap` with the batch in the last axis, where a CPU computes physics of many environments in vectors.

The rules of `jax.vmap` put it first. Then loops over the 3 or 4 numbers of vectors and quaternions are the
innermost ones, too short for the vectors of a CPU.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.extend import core

from purejaxppo.types import PyTree


class _Value(NamedTuple):
    array: Any
    batched: bool  # in its last axis
    work: int = 0  # operations for each number since those that are in memory, up to `_MUCH`

    def full(self, size: int) -> Array:
        """[..., size]."""
        if self.batched:
            return self.array
        return jnp.broadcast_to(self.array[..., None], (*self.array.shape, size))


def batched_last(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The same function, which `jax.vmap` computes with the batch in the last axis.

    That is faster where nearly all is elementwise, or products of few numbers, or moves numbers to places known
    in advance, as in the physics of Brax and MuJoCo's MJX. What there is no rule for here is computed by that of
    `jax.vmap`. Loops end early that have come to an end for all of the batch. It can be differentiated outside of
    `jax.vmap`, not within, and only forwards where there are such loops.
    """
    batched_function = custom_vmap(function)

    @batched_function.def_vmap
    def _(size: int, batched: Any, *arguments: PyTree) -> tuple[PyTree, PyTree]:
        leaves, tree = jax.tree.flatten(arguments)
        of_batch = jax.tree.leaves(batched)
        shapes = [x.shape[1:] if b else x.shape for x, b in zip(leaves, of_batch, strict=True)]
        one = map(jax.ShapeDtypeStruct, shapes, (x.dtype for x in leaves))
        arrays = [jnp.moveaxis(x, 0, -1) if b else x for x, b in zip(leaves, of_batch, strict=True)]
        values = list(map(_Value, arrays, of_batch))
        program, out = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(tree, one))
        results = [jnp.moveaxis(x, -1, 0) for x in _full(program, values, size)]
        all_batched = jax.tree.map(lambda _: True, out)
        return jax.tree.unflatten(jax.tree.structure(out), results), all_batched

    return batched_function


def _evaluate(program: core.ClosedJaxpr, inputs: Sequence[_Value], size: int) -> list[_Value]:
    """Of a program for one of the batch, what it computes for all."""
    jaxpr = program.jaxpr
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    values.update(
        (name, _Value(jnp.asarray(x), False))
        for name, x in zip(jaxpr.constvars, program.consts, strict=True)
    )

    def read(x: Any) -> _Value:
        if isinstance(x, core.Literal):
            return _Value(np.asarray(x.val, x.aval.dtype), False)  # type: ignore[attr-defined]
        return values[x]

    for equation in jaxpr.eqns:
        if equation.primitive.name in _READ_AGAIN:
            names = [x for x in equation.invars if not isinstance(x, core.Literal)]
            values.update((x, _once(values[x])) for x in names)
        outputs = _compute(equation, [read(x) for x in equation.invars], size)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _compute(equation: Any, operands: list[_Value], size: int) -> list[_Value]:
    name, params = equation.primitive.name, equation.params
    arrays, batched = [x.array for x in operands], [x.batched for x in operands]
    if name in _CALLS:
        return _evaluate(params[_CALLS[name]], operands, size)
    if name in _CONTROL_FLOW and any(batched[:1] if name == "cond" else batched):
        return _CONTROL_FLOW[name](equation, operands, size)
    places = name in _WITH_PLACES
    if not any(batched):
        results = equation.primitive.bind(*arrays, **params)
    elif name in _RULES and not (places and batched[1]):
        full = [x.array if places and i == 1 else x.full(size) for i, x in enumerate(operands)]
        results = _RULES[name](equation, size, *full)
    else:
        first = [jnp.moveaxis(x, -1, 0) if b else x for x, b in zip(arrays, batched, strict=True)]
        one = functools.partial(equation.primitive.bind, **params)
        results = jax.vmap(one, [0 if of_batch else None for of_batch in batched], -1)(*first)
    results = results if equation.primitive.multiple_results else [results]
    work = _work(name, [x.work for x in operands if x.batched])
    return [_Value(x, any(batched), work) for x in results]


def _work(name: str, of_operands: list[int]) -> int:
    rule = _RULES.get(name)
    if rule is _function or not of_operands:
        return 0
    if rule in (_dot_general, _reduce, _reduce_sum):
        return _MUCH
    return min(_MUCH, 1 + sum(of_operands) if rule is _elementwise else max(of_operands))


def _cond(equation: Any, operands: list[_Value], size: int) -> list[_Value]:
    """All branches for all of the batch, each of which takes its own."""
    which, *operands = operands
    branches = [_full(branch, operands, size) for branch in equation.params["branches"]]

    def taken(*cases: Array) -> Array:
        return lax.select_n(jnp.broadcast_to(which.array, cases[0].shape), *cases)

    return [_Value(taken(*cases), True, _MUCH) for cases in zip(*branches, strict=True)]


def _while(equation: Any, operands: list[_Value], size: int) -> list[_Value]:
    """For as long as the condition holds for any of the batch; where it does not, nothing changes."""
    params = equation.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    operands = [_Value(x.array, x.batched) for x in operands]
    consts, operands = operands[:of_condition], operands[of_condition:]
    body_consts, operands = operands[:of_body], operands[of_body:]

    def holds(carry: list[Array]) -> Array:
        (result,) = _full(params["cond_jaxpr"], [*consts, *_batched(carry)], size)
        return result

    def step(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        unfinished, carry = state
        now = _full(params["body_jaxpr"], [*body_consts, *_batched(carry)], size)
        carry = [jnp.where(unfinished, x, before) for x, before in zip(now, carry, strict=True)]
        return holds(carry), carry

    initial = [x.full(size) for x in operands]
    start = holds(initial), initial
    return _batched(lax.while_loop(lambda state: state[0].any(), step, start)[1])


def _scan(equation: Any, operands: list[_Value], size: int) -> list[_Value]:
    params, step = equation.params, equation.params["jaxpr"]

    def same(outer: list[Any], inner: list[Any]) -> int:
        """How many have the axes that they have within a step: those that are no row of an array."""
        return sum(x.aval.ndim == y.aval.ndim for x, y in zip(outer, inner, strict=True))

    num_carry = same(equation.outvars, step.jaxpr.outvars)
    rows = same(equation.invars, step.jaxpr.invars)  # after constants and what is carried
    consts = [_Value(x.array, x.batched) for x in operands[: rows - num_carry]]
    initial = [x.full(size) for x in operands[rows - num_carry : rows]]
    inputs = operands[rows:]

    def forwards(carry: Sequence[Array], xs: Any) -> tuple[list[Array], list[Array]]:
        now = [_Value(x, of.batched) for x, of in zip(xs, inputs, strict=True)]
        results = _full(step, [*consts, *_batched(carry), *now], size)
        return results[:num_carry], results[num_carry:]

    if (condition := _condition_of(step.jaxpr)) is not None:

        def goes_on(state: tuple[Array, list[Array]]) -> Array:
            return (state[0] < params["length"]) & state[1][condition].any()

        def once_more(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
            return state[0] + 1, forwards(state[1], [])[0]

        return _batched(lax.while_loop(goes_on, once_more, (jnp.zeros((), jnp.int32), initial))[1])
    arrays = [x.array for x in inputs]
    same_params = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, results = lax.scan(forwards, initial, arrays, **same_params)
    return _batched([*carry, *results])


def _condition_of(step: core.Jaxpr) -> int | None:
    """Which of what a loop carries is a condition without which its steps do nothing, except to clear it.

    So JAXopt and MuJoCo's MJX iterate, whose loops can be differentiated. There is no need to go on once it
    holds for none of a batch.
    """
    if [x.primitive.name for x in step.eqns] != ["convert_element_type", "cond"]:
        return None
    convert, cond = step.eqns
    (condition,) = convert.invars
    carry = step.invars[len(step.invars) - len(step.outvars) :]
    idle = cond.params["branches"][0].jaxpr
    from_step = dict(zip(idle.invars, cond.invars[1:], strict=True))

    def stays(after: Any, before: Any) -> bool:
        if isinstance(after, core.Literal):
            return before is condition and not after.val
        return from_step.get(after) is before

    is_all = cond.invars[:1] + cond.outvars == convert.outvars + step.outvars and not idle.eqns
    if not is_all or not all(map(stays, idle.outvars, carry)):
        return None
    return next((i for i, x in enumerate(carry) if x is condition), None)


def _full(program: core.ClosedJaxpr, inputs: Sequence[_Value], size: int) -> list[Array]:
    return [x.full(size) for x in _evaluate(program, inputs, size)]


def _batched(arrays: Sequence[Array]) -> list[_Value]:
    """What is in memory, each of the batch its own."""
    return [_Value(x, True) for x in arrays]


def _as_it_is(equation: Any, size: int, *operands: Array) -> Array:
    del size
    return equation.primitive.bind(*operands, **equation.params)


def _elementwise(equation: Any, size: int, *operands: Array) -> Array:
    """Scalars go with arrays of any shape."""
    shape = (*equation.outvars[0].aval.shape, size)
    return _as_it_is(equation, size, *(jnp.broadcast_to(x, shape) for x in operands))


def _function(equation: Any, size: int, *operands: Array) -> Array:
    return _stored(_elementwise(equation, size, *operands))


def _broadcast_in_dim(equation: Any, size: int, x: Array) -> Array:
    shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
    return lax.broadcast_in_dim(x, (*shape, size), (*places, len(shape)))


def _reshape(equation: Any, size: int, x: Array) -> Array:
    return x.reshape(*equation.params["new_sizes"], size)


def _slice(equation: Any, size: int, x: Array) -> Array:
    params = equation.params
    strides = params["strides"] and (*params["strides"], 1)
    limits = (*params["limit_indices"], size)
    return lax.slice(x, (*params["start_indices"], 0), limits, strides)


def _transpose(equation: Any, size: int, x: Array) -> Array:
    del size
    return lax.transpose(x, (*equation.params["permutation"], x.ndim - 1))


def _tile(equation: Any, size: int, x: Array) -> Array:
    del size
    return jnp.tile(x, (*equation.params["reps"], 1))


def _pad(equation: Any, size: int, x: Array, value: Array) -> Array:
    del size
    return lax.pad(x, value, (*equation.params["padding_config"], (0, 0, 0)))


def _dot_general(equation: Any, size: int, left: Array, right: Array) -> Array:
    """As sums of products: for a library the matrices of one environment are too little work.

    Few terms are written out, or the loop over them would be the innermost.
    """
    summed, shared = equation.params["dimension_numbers"]

    def in_order(x: Array, side: int) -> Array:
        """[*shared, own of the left or 1, own of the right or 1, summed, size]."""
        own = sorted(set(range(x.ndim - 1)) - {*shared[side], *summed[side]})
        batch = [x.shape[axis] for axis in shared[side]]
        width, terms = (math.prod(x.shape[axis] for axis in axes) for axes in (own, summed[side]))
        x = lax.transpose(x, (*shared[side], *own, *summed[side], x.ndim - 1))
        return x.reshape(*batch, *((1, width) if side else (width, 1)), terms, size)

    left, right = in_order(left, 0), in_order(right, 1)
    terms = left.shape[-2]
    if 0 < terms <= _FEW:
        each = [[lax.index_in_dim(x, i, -2, False) for i in range(terms)] for x in (left, right)]
        total = functools.reduce(operator.add, map(operator.mul, *each))
    else:
        total = _stored(_sum_of_products(left, right))
    return total.reshape(*equation.outvars[0].aval.shape, size)


def _sum_of_products(left: Array, right: Array) -> Array:
    """In parts where XLA would write each product to memory, and then sums of windows of them."""
    axis, terms = left.ndim - 2, left.shape[-2]
    in_part = terms if terms <= _AT_ONCE else _UNROLLED

    def part(start: int) -> Array:
        end = min(start + in_part, terms)
        x, y = (lax.slice_in_dim(of, start, end, axis=axis) for of in (left, right))
        return _sum(x * y, axis)

    starts = range(0, terms, in_part) if terms else [0]
    return functools.reduce(operator.add, map(part, starts))


def _once(x: _Value) -> _Value:
    """The same, in memory where XLA might compute much of it anew for each place that a kernel reads."""
    if not x.batched or x.work < _MUCH:
        return x
    return _Value(_stored(x.array), True)


def _stored(x: Array) -> Array:
    """The same, divided by 1, or by itself where it is not a number, which XLA does not see.

    What it divides it does not compute anew within each kernel that reads it from several places.
    """
    if x.dtype == bool:
        return _stored(x.astype(jnp.float32)) != 0
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    one = np.ones((), x.dtype)
    return lax.div(x, lax.stop_gradient(lax.clamp(one, x, one)))


def _reduce(equation: Any, size: int, x: Array) -> Array:
    del size

    def reduce_axis(x: Array, axis: int) -> Array:
        return equation.primitive.bind(x, **equation.params | {"axes": (axis,)})

    return _one_after_another(reduce_axis, x, equation.params["axes"])


def _reduce_sum(equation: Any, size: int, x: Array) -> Array:
    del size
    return _one_after_another(_sum, x, equation.params["axes"])


def _one_after_another(
    reduce_axis: Callable[[Array, int], Array], x: Array, axes: Sequence[int]
) -> Array:
    """For the few numbers of one axis there is no loop, so that the innermost is over the batch."""
    for axis in sorted(axes, reverse=True):
        x = reduce_axis(x, axis)
        x = x if axis == min(axes) else _stored(x)
    return x


def _sum(x: Array, axis: int) -> Array:
    """Not by YNNPACK, to which XLA leaves sums if it sees that they are: it takes 50 us for those of 3 terms."""
    return lax.reduce(x, np.zeros((), x.dtype), lambda a, b: a - (-b), [axis])


def _gather(equation: Any, size: int, x: Array, places: Array) -> Array:
    numbers = equation.params["dimension_numbers"]
    offsets = (*numbers.offset_dims, equation.outvars[0].aval.ndim)
    params = equation.params | {
        "dimension_numbers": numbers._replace(offset_dims=offsets),
        "slice_sizes": (*equation.params["slice_sizes"], size),
    }
    return equation.primitive.bind(x, places, **params)


def _scatter(equation: Any, size: int, x: Array, places: Array, updates: Array) -> Array:
    del size
    numbers = equation.params["dimension_numbers"]
    windows = (*numbers.update_window_dims, updates.ndim - 1)
    params = equation.params | {"dimension_numbers": numbers._replace(update_window_dims=windows)}
    return equation.primitive.bind(x, places, updates, **params)


# Terms of a product that are written out: as many as a quaternion has numbers.
_FEW = 4

# Terms that XLA adds up in one loop, and those for which it writes no loop.
_AT_ONCE, _UNROLLED = 32, 8

# Operations that take longer than writing a number to memory and reading it again.
_MUCH = 5

# What only calls a program, and the parameter that this is.
_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}

# What contains programs that are computed once for each step, or for some of the batch.
_CONTROL_FLOW = {"cond": _cond, "scan": _scan, "while": _while}

# Whose second operand, of places or of a value to fill up with, must be the same for all of the batch.
_WITH_PLACES = ("gather", "scatter", "scatter-add", "pad")

# Which read a number of their operand for several of their results, or kernels do that read these.
_READ_AGAIN = ("dot_general", "slice", "transpose", "unstack")

_ELEMENTWISE = """
abs add and ceil clamp convert_element_type copy div eq floor ge gt integer_pow is_finite le lt max min mul ne neg
not or rem round rsqrt select_n sign sqrt square sub xor
"""
# Which take far longer than arithmetic.
_FUNCTIONS = "acos asin atan atan2 cos cosh exp expm1 log log1p logistic pow sin sinh tan tanh"

_REDUCTIONS = "reduce_and reduce_max reduce_min reduce_or"

_RULES = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_FUNCTIONS.split(), _function),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    "broadcast_in_dim": _broadcast_in_dim,
    **dict.fromkeys(("argmax", "argmin", "concatenate", "squeeze", "stack", "unstack"), _as_it_is),
    "dot_general": _dot_general,
    "gather": _gather,
    "pad": _pad,
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "slice": _slice,
    "tile": _tile,
    "transpose": _transpose,
}
