"""Small iterations of the algorithm and its phases, compiled as fast as they can be."""

import functools

import jax

from purejaxppo import ppo, rollouts, updates
from purejaxppo.config import Config, Hyper
from purejaxppo.train import as_arrays, make_setup

SMALL = {"num_envs": 8, "num_steps": 8, "torso_layers": (8,), "num_minibatches": 2}
# Compiling is most of the time here; what is learnt does not depend on how well it is done.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}

jit = functools.partial(jax.jit, compiler_options=FAST)
advantages = jit(rollouts.advantages, static_argnums=0)
init = jit(ppo.init, static_argnums=0)
iterate = jit(ppo.iterate, static_argnums=0)
draw = jit(rollouts.draw, static_argnums=0)
update = jit(updates.update, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)  # also within others
def apply(agent, *arguments):
    return agent.apply(*arguments)


def roll(setup, state, key):
    return rollouts.rollout(setup, state, rollouts.draw(setup, key))


rollout = jit(roll, static_argnums=0)


def setup_and_state(env, hyper=None, seed=0, **options):
    """A small training of an environment, before its first iteration."""
    setup = make_setup(Config(**SMALL | options), env)
    hyper = as_arrays(hyper or Hyper())
    return setup, init(setup, jax.random.key(seed), hyper), hyper
