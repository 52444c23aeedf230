"""How runs lie on devices, and what memory they take there, before anything is compiled."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import jax

from purejaxppo import envs
from purejaxppo.config import Config
from purejaxppo.distributions import num_outputs
from purejaxppo.rollouts import Setup, final_slots, num_microbatches
from purejaxppo.types import Metrics, PyTree

# Most iterations a chunk can be asked for: enough that launching it costs nothing.
MAX_CHUNK = 256
# Bytes of activations that a CPU core's cache holds: of blocks with more, runs are slower by up to 30%.
_CACHED = 5 * 2**18
_MOST_CACHED_RUNS = 8  # beyond which nothing was gained
# Multiplications of a minibatch by hidden layers, and environments, from which a second core pays.
_FEW_PRODUCTS = 2**23
_FEW_ENVS = 1024


@dataclass(frozen=True)
class Plan:
    """How R runs are laid out: blocks of vmapped runs, one after another, on every device.

    Attributes:
        num_devices: that have runs of their own.
        block: runs vmapped together.
        shards: devices that share the environments of each run; 1 where it has one for itself.
    """

    num_runs: int
    num_devices: int
    block: int
    shards: int = 1

    @property
    def padded(self) -> int:
        """Runs computed. The last is repeated to fill the blocks: a smaller one compiles anew."""
        unit = self.num_devices * self.block
        return -(-self.num_runs // unit) * unit

    @property
    def summing_processes(self) -> int:
        """Processes that a run's sums are made in, each of which adds its own first."""
        return jax.process_count() if self.shards > 1 else 1

    @property
    def one_or_several(self) -> str:
        """Devices: programs for one are rewritten in another way, and may round differently."""
        return "one" if self.num_devices == 1 else "several"


def make_plan(
    setup: Setup, num_runs: int, block: int | None = None, shard_environments: bool = False
) -> Plan:
    """The layout of runs on the devices at hand.

    The block fixes the arithmetic: the same block size gives the same bits on one device, or on any
    number of several. Its default on a CPU fits the cache, on other devices it is all of their runs.
    """
    devices = jax.devices()
    num_devices = 1 if shard_environments else min(len(devices), num_runs)
    if jax.process_count() > 1 and not shard_environments:
        num_devices = len(devices)
    if block is None:
        block = -(-num_runs // num_devices)
        if devices[0].platform == "cpu":
            block = -(-block // -(-block // _cached_runs(setup)))
    if jax.process_count() == 1:  # else every process has a part
        used = -(-num_runs // block)
        num_devices = min(num_devices, max(used, 2))  # one alone may round differently
    return Plan(num_runs, num_devices, block, len(devices) if shard_environments else 1)


def _cached_runs(setup: Setup) -> int:
    """Runs whose minibatches a CPU's core trains fastest together: those that its cache holds."""
    return min(max(_CACHED // _activations(setup), 1), _MOST_CACHED_RUNS)


def _activations(setup: Setup) -> int:
    """Bytes of what the layers hold of a run's minibatch, or of the part that is done at a time."""
    samples = setup.config.batch_size // setup.config.num_minibatches
    return 4 * setup.agent.num_units * (samples // num_microbatches(setup))


@dataclass(frozen=True)
class Footprint:
    """Bytes of memory a run takes on its device, estimated before anything is compiled.

    Attributes:
        held: always: its state going into a chunk and coming out of it, and its metrics.
        work: while it is in the block at hand: rollout, activations and gradients.
    """

    held: int
    work: int

    def total(self, plan: Plan) -> int:
        """Of all runs on all devices."""
        return (plan.padded * self.held + plan.num_devices * plan.block * self.work) * plan.shards


def make_footprint(
    setup: Setup, plan: Plan, states: PyTree, saved: int = 0, eval_episodes: int = 0
) -> Footprint:
    """The footprint of a run whose states have these shapes, of all that the plan computes.

    Args:
        saved: bytes of a run that are on their way to a checkpoint.
        eval_episodes: of an evaluation.

    How often rollout, state and activations are there at a time was read off compiled programs.
    """
    config, env, _ = setup
    each = plan.padded * plan.shards
    state = nbytes(states) // each
    pool = env.pool_size * nbytes(states.env_state) // each
    per_sample = nbytes(states.env_state.obs) // (each * config.num_envs)
    per_sample += 4 * (2 * num_outputs(env.action_space) + 10)
    rollout = config.batch_size * per_sample + final_slots(setup) * nbytes(states.carry) // each
    order = 4 * config.update_epochs * config.batch_size
    metrics = 4 * MAX_CHUNK * len(Metrics.__dataclass_fields__)
    held = 2 * state + metrics + saved // plan.shards
    work = int(2.5 * rollout + 2 * order + 2 * (state + pool) + 2.5 * _activations(setup))
    per_episode = 2 * nbytes(states.env_state) // (each * config.num_envs)
    per_episode += 4 * setup.agent.num_units
    return Footprint(held, max(work, eval_episodes * per_episode))


def nbytes(shapes: PyTree) -> int:
    """Bytes of arrays or their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def fit(plan: Plan, footprint: Footprint, limit: int) -> Plan | None:
    """The plan with the largest block, up to its own, that stays below `limit` bytes in all."""
    for block in range(plan.block, 0, -1):
        smaller = dataclasses.replace(plan, block=block)
        if footprint.total(smaller) <= limit:
            return smaller
    return None


def suits_one_thread(config: Config) -> bool:
    """Whether a CPU trains a run fastest in one thread, which must be known before its first array is made.

    XLA hands even small kernels from core to core, which costs more than the other core is worth. A
    program of several runs has a core for each device anyhow.
    """
    torso = (64, 64) if config.torso_layers is None else config.torso_layers
    parts = [(*torso, *config.policy_layers), (*torso, *config.value_layers)]
    products = sum(a * b for part in parts for a, b in itertools.pairwise(part))
    if units := config.gru_units:
        products += 3 * units * (units + (torso[-1] if torso else 0))
    return (
        envs.has_vectors(config.env)
        and config.num_envs < _FEW_ENVS
        and products * config.batch_size < _FEW_PRODUCTS * config.num_minibatches
    )
