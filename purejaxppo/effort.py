"""How hard XLA tries: a program that hardly runs need not be compiled for speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from purejaxppo import machine
from purejaxppo.rollouts import Setup

# Numbers an equation computes, all its repetitions together, from which it is worth optimising. A CPU
# loses 0.2 to 1.1 ns a number (CartPole, Pendulum, MinAtar, Brax, Octax) and gains 1.5 to 3.6 ms an equation;
# with JAX 0.11, whose only emitters are the newer ones, it gains less.
_WORTH_OPTIMIZING = 500_000

# Operations of products, on each device, from which kernels are tried for them on a GPU. On an H200 256 runs of CartPole, 3.1e13
# of them, train 4 s longer without, and start 40 s sooner. So 3.3e14 would gain nothing: an eighth of that, as
# this is one program on one GPU.
_WORTH_TRYING = 4e13


def quick_below(jaxpr: core.Jaxpr) -> float:
    """Calls of a program below which it takes longer to optimise than that gains.

    What a loop repeats for as long as a condition holds is counted once: such repetitions are calls.
    """
    on_a_gpu = jax.default_backend() == "gpu"
    return _quick_below_on_gpus(jaxpr) if on_a_gpu else _quick_below_on_cpus(jaxpr)


def _quick_below_on_cpus(jaxpr: core.Jaxpr) -> float:
    """Products are left out: libraries compute them however a program is compiled."""
    equations = numbers = 0
    for equation, repeated in each_equation(jaxpr):
        equations += 1
        if equation.primitive.name != "dot_general":
            numbers += repeated * sum(
                math.prod(getattr(x.aval, "shape", ())) for x in equation.outvars
            )
    return _WORTH_OPTIMIZING * equations / numbers if numbers else math.inf


def _quick_below_on_gpus(jaxpr: core.Jaxpr) -> float:
    """Products alone have kernels to be tried."""
    operations = sum(repeated * _operations(each) for each, repeated in each_equation(jaxpr))
    return _WORTH_TRYING / operations if operations else math.inf


def _operations(equation: Any) -> int:
    """Multiplications and additions of a product or a convolution."""
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            terms = math.prod(shape[axis] for axis in contracted)
        case "conv_general_dilated":
            shape = equation.invars[1].aval.shape
            terms = math.prod(shape) // shape[equation.params["dimension_numbers"].rhs_spec[0]]
        case _:
            return 0
    return 2 * terms * math.prod(equation.outvars[0].aval.shape)


def each_equation(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, times: int = 1
) -> Iterator[tuple[Any, int]]:
    """Of a program and all within it, with how often it is computed where scans repeat it.

    A function with a derivative of its own, such as an activation, is one equation, as is a kernel of Pallas.
    """
    for equation in jaxpr.eqns:
        yield equation, times
        if equation.primitive.name in ("custom_jvp_call", "pallas_call"):
            continue
        repeated = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                yield from each_equation(inner, times * repeated)


def compiler_options(setup: Setup, quick: bool = False) -> dict[str, Any]:
    """How XLA compiles for the devices at hand.

    On GPUs quick is not to try which of many kernels is fastest for each product.
    """
    match jax.default_backend():
        case "cpu":
            return _cpu_options(setup, quick)
        case "gpu" if quick:
            return {"xla_gpu_autotune_level": 0}
    return {}


def _cpu_options(setup: Setup, quick: bool) -> dict[str, Any]:
    """How XLA compiles for CPUs.

    Level 1 of its effort compiles up to a third faster than its default, 3. Most environments train as
    fast, Pong of Gymnax's misc and MemoryChain, which has a GRU, 1.2 and 1.6 times as fast, but Seaquest at
    0.67 of the speed. Physics in lanes has level 3: with 1 Brax's hopper and ant train at 0.8 and 0.6 of the
    speed. Vectors are as wide as the core has them: XLA's own 256 bits take 6 to 12% longer where there
    are 512. Quick is level 0 with the older emitters of kernels: a fifth to a third of the time to compile,
    programs that take two to fifteen times as long. A program with EnvPool has all cores for its one device,
    and YNNPACK takes only one for each of Winograd's small products: it is left the reductions alone.
    """
    options: dict[str, Any] = {
        "xla_backend_optimization_level": 0 if quick else 3 if setup.env.in_lanes else 1,
        "xla_cpu_prefer_vector_width": 512,
    }
    if quick and jax.__version_info__ < (0, 11):  # later ones have only the newer emitters
        options["xla_cpu_use_fusion_emitters"] = False
        # Code in several parts rounds differently in programs for one device and for several.
        options["xla_cpu_parallel_codegen_split_count"] = 1
    if setup.env.external and setup.agent.network.cnn_layers and machine.num_cores() > 1:
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_REDUCE"
    return options
