"""Trainings as compiled programs: one run as a pure function, and many runs over all devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from purejaxppo import envs, ppo
from purejaxppo.agent import make_agent
from purejaxppo.config import Config, Hyper
from purejaxppo.devices import AXIS
from purejaxppo.effort import compiler_options
from purejaxppo.envs.base import VectorEnvironment
from purejaxppo.envs.checks import check_environment
from purejaxppo.envs.custom import adapted
from purejaxppo.evaluate import evaluate
from purejaxppo.plan import MAX_CHUNK, Plan
from purejaxppo.rollouts import Setup
from purejaxppo.types import Episode, Metrics, PyTree, TrainState
from purejaxppo.validation import validate_desired_kl, validate_hyper, validated
from purejaxppo.values import ConfigError


def make_setup(
    config: Config,
    env: envs.Environment | None = None,
    seeds: Sequence[int] = (0,),
    begun: int = 0,
) -> Setup:
    """Environment and agent of a configuration.

    Args:
        env: an `Environment`, or one of Gymnax's style, in place of the one that the configuration names.
        seeds, begun: of the runs, see `envs.vectorize`.

    Raises:
        ConfigError: a value that an option does not allow, an unknown environment, or an option
            that does not fit it.
    """
    if jax.dtypes.result_type(float) != np.float32:
        raise ConfigError("JAX_ENABLE_X64: all is computed in float32; turn it off")
    config = validated(config)
    if env is None:
        env = envs.make(config.env, config.env_options)
    else:
        env = adapted(type(env).__name__, env)
    vector = envs.vectorize(config, env, seeds=seeds, begun=begun)
    agent = make_agent(config, vector.observation_space, vector.action_space)
    return Setup(config, vector, agent)


def make_train(
    config: Config, env: envs.Environment | None = None
) -> Callable[[Array, Hyper], tuple[TrainState, Metrics]]:
    """A whole training as one pure function of (key, hyper), to be jitted and vmapped.

    It returns the final state and metrics [iterations].

    Args:
        env: as `make_setup` takes it.

    Raises:
        ConfigError: as `make_setup`, an environment outside of the program, or one that is not as the
            protocol says; when called, a Hyper that does not go with the configuration.
    """
    if env is not None:
        name = type(env).__name__
        env = adapted(name, env)
        check_environment(name, env)
        config = dataclasses.replace(config, env=name)  # as messages call it
    setup = make_setup(config, env)
    if setup.env.external:
        raise ConfigError(
            f"{config.env} lives outside of the program: train it by the command line"
        )
    count = setup.config.iterations

    def train(key: Array, hyper: Hyper) -> tuple[TrainState, Metrics]:
        validate_desired_kl(setup.config, hyper)
        hyper = as_arrays(hyper)
        if not _is_key(key):  # of jax.random.PRNGKey
            key = jax.random.wrap_key_data(key)
        return jax.lax.scan(
            lambda state, _: ppo.iterate(setup, state, hyper, float(count)),
            ppo.init(setup, key, hyper),
            length=count,
        )

    return train


def as_arrays(hyper: Hyper) -> Hyper:
    """Strong float32 arrays, so that a Python number and an array compile to the same program."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), hyper)


def stack_hypers(hypers: list[Hyper]) -> Hyper:
    """[R] one hyperparameter set a run.

    Raises:
        ConfigError: there is none, some leave out an optional one that others have, or a value is out
            of range.
    """
    for hyper in hypers:
        validate_hyper(hyper)
    if len({jax.tree.structure(hyper) for hyper in hypers}) != 1:
        raise ConfigError("hypers: at least one, and all with the same optional values left out")
    return jax.tree.map(lambda *x: np.asarray(x, np.float32), *hypers)


class Trainer:
    """The compiled programs of R runs; every leaf of states and hyperparameters is [R, ...].

    init(seeds, hypers, ()) -> states
    chunk(states, hypers, (count, iterations)) -> (states, Metrics [R, MAX_CHUNK]), of which the
        first `count` hold; the states given are used up
    evaluate(states, hypers, ()) -> Episode [R, E]

    Where D devices share the environments of a run, leaves of states and results are [R, D, ...].

    Args:
        setup: for the environments of one device.
        eval_sampled: evaluate with sampled actions, not the most likely ones.
    """

    def __init__(
        self,
        setup: Setup,
        plan: Plan,
        eval_env: VectorEnvironment | None = None,
        eval_sampled: bool = False,
    ):
        self.setup, self.plan = setup, plan
        devices = np.array(jax.devices()[: plan.num_devices * plan.shards])
        self.mesh = Mesh(devices.reshape(plan.num_devices, plan.shards), ("runs", AXIS))
        self._by_run = PartitionSpec("runs")
        self._by_shard = PartitionSpec("runs", AXIS) if plan.shards > 1 else self._by_run
        self.init = self._map(functools.partial(_init, setup), self._by_run, quick=True)
        chunk = functools.partial(_chunk, setup)
        self.chunk = self._map(chunk, self._by_shard, donate_argnums=0)
        self.evaluate = self._map(
            functools.partial(_evaluate, setup, eval_env or setup.env, eval_sampled), self._by_shard
        )

    def shard(self, runs: PyTree) -> PyTree:
        """Host arrays [num_runs, ...] as device arrays [padded, ...]."""
        sharding = NamedSharding(self.mesh, self._by_run)
        return jax.tree.map(lambda x: _put(self._padded(x), sharding), runs)

    def sharded_like(self, shapes: PyTree) -> PyTree:
        """Shapes of the device arrays of a state, with the sharding that these have."""
        sharding = NamedSharding(self.mesh, self._by_shard)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )

    def fetch(self, runs: PyTree, donated: bool = True) -> PyTree:
        """Device arrays [padded, ...] as host arrays [num_runs, ...], in every process.

        Typed keys become their numbers. Nothing is shared with the devices, which may go on; what is not
        `donated` to them later, as metrics are not, need not be copied on a CPU.
        """
        runs = _numbers(runs)
        if jax.process_count() > 1:
            runs = multihost_utils.process_allgather(runs, tiled=True)
        on_host = _host_copy if donated else np.asarray
        return jax.tree.map(lambda x: on_host(x)[: self.plan.num_runs], runs)

    def fetch_whole(self, states: PyTree, whole: PyTree) -> PyTree:
        """States, or a part of them, with the environments of all devices: as they are saved.

        Args:
            whole: their shapes in `saved_shapes`.
        """
        merge = _merge if self.plan.shards > 1 else lambda x, _: x
        return jax.tree.map(merge, self.fetch(states), whole)

    def put_whole(self, states: PyTree, shapes: PyTree) -> PyTree:
        """What `fetch_whole` gave, on these devices, which may be others.

        Args:
            shapes: of the device arrays, from `sharded_like`.
        """

        def put(x: np.ndarray, shape: jax.ShapeDtypeStruct) -> Array:
            if self.plan.shards > 1:
                x = _split(x, self.plan.shards, jax.eval_shape(_numbers, shape).shape[2:])
            placed = _put(self._padded(x), shape.sharding)
            if not _is_key(shape):
                return placed
            impl = jax.random.key_impl(jnp.zeros((), shape.dtype))  # only an array says it
            return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl))(placed)

        return jax.tree.map(put, states, shapes)

    def _padded(self, x: np.ndarray) -> np.ndarray:
        """[padded, ...] of [num_runs, ...]: the last one repeated."""
        return np.concatenate([x, np.repeat(x[-1:], self.plan.padded - self.plan.num_runs, 0)])

    def _map(
        self,
        function: Callable[..., PyTree],
        state_spec: PartitionSpec,
        quick: bool = False,
        **jit_options: Any,
    ) -> Any:
        """Jitted: function(state, hyper, shared) of each run, in blocks on every device."""

        def blocks(states: PyTree, hypers: Hyper, shared: PyTree) -> PyTree:
            if AXIS in state_spec:
                states = jax.tree.map(lambda x: x[:, 0], states)  # this device's own
            each = lambda run: function(*run, shared)  # noqa: E731
            results = _map_in_blocks(each, (states, hypers), self.plan.block)
            if self.plan.shards > 1:
                results = jax.tree.map(lambda x: x[:, None], results)
            return results

        # Runs are independent: there is no replication between devices to be checked.
        sharded = jax.shard_map(
            blocks,
            mesh=self.mesh,
            in_specs=(state_spec, self._by_run, PartitionSpec()),
            out_specs=self._by_shard,
            check_vma=False,
        )
        options = compiler_options(self.setup, quick)
        return jax.jit(sharded, compiler_options=options, **jit_options)


def _map_in_blocks(each: Callable[[PyTree], PyTree], runs: PyTree, block: int) -> PyTree:
    """each(run) of runs [R, ...]. Neither a loop nor a vmap over one, which take long to trace."""
    if jax.tree.leaves(runs)[0].shape[0] == 1:
        only = jax.tree.map(lambda x: jax.lax.squeeze(x, [0]), runs)
        return jax.tree.map(lambda x: jax.lax.expand_dims(x, [0]), each(only))
    return jax.lax.map(each, runs, batch_size=block if block > 1 else None)


def run_shapes(setup: Setup, hyper: Hyper) -> TrainState:
    """Shapes of the state of one run on one device."""
    return jax.eval_shape(functools.partial(ppo.init, setup), jax.random.key(0), hyper)


def saved_shapes(run: PyTree, num_runs: int) -> PyTree:
    """Shapes [num_runs, ...] in which states are saved, however they lie on devices.

    Args:
        run: `run_shapes` with all environments of a run, or a part of them.
    """
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_runs, *x.shape), x.dtype),
        jax.eval_shape(_numbers, run),
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _numbers(tree: PyTree) -> PyTree:
    """Arrays, with the numbers of typed keys in their place."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _put(x: np.ndarray, sharding: NamedSharding) -> Array:
    """A host array on the devices, of which each process has some."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    # Which does not compare what the processes have, as if NaN were unequal to itself.
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _host_copy(x: Array | np.ndarray) -> np.ndarray:
    """A copy that leaves the device array free to be donated, which a view would prevent."""
    if isinstance(x, np.ndarray):
        return x
    copy = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        copy[shard.index] = np.asarray(shard.data)
    return copy


def _merge(x: np.ndarray, whole: jax.ShapeDtypeStruct) -> np.ndarray:
    """[R, ...] with all environments, of [R, D, ...]; what all devices have alike is there once."""
    if x.shape[2:] == whole.shape[1:]:
        return x[:, 0]
    (axis,) = _differing(x.shape[2:], whole.shape[1:])
    return np.concatenate(list(np.moveaxis(x, 1, 0)), axis + 1)


def _split(x: np.ndarray, shards: int, part: tuple[int, ...]) -> np.ndarray:
    """[R, D, ...] of [R, ...] with all environments, of which a device has `part`."""
    if x.shape[1:] == part:
        return np.repeat(x[:, None], shards, 1)
    (axis,) = _differing(x.shape[1:], part)
    return np.stack(np.split(x, shards, axis + 1), 1)


def _differing(shape: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    """The axes in which two shapes differ: the one of the environments."""
    return [i for i, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]


def _init(setup: Setup, seed: Array, hyper: Hyper, _: tuple[()]) -> TrainState:
    """The state of the run with a seed, uint32 []."""
    return ppo.init(setup, jax.random.key(seed), hyper)


def _chunk(
    setup: Setup, state: TrainState, hyper: Hyper, shared: tuple[Array, Array]
) -> tuple[TrainState, Metrics]:
    """`count` iterations; shared is (count [] int32, iterations [] float32).

    The count is an argument, so a shorter last chunk and a longer training are the same program.
    """
    count, iterations = shared
    dtypes = {"episodes": jnp.int32, "invalid_steps": jnp.int32}
    names = Metrics.__dataclass_fields__
    blank = Metrics(**{name: jnp.zeros(MAX_CHUNK, dtypes.get(name)) for name in names})

    def body(i: Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
        state, metrics = carry
        state, new = ppo.iterate(setup, state, hyper, iterations)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return state, jax.tree.map(put, metrics, new)

    return jax.lax.fori_loop(0, count, body, (state, blank))


def _evaluate(
    setup: Setup,
    env: VectorEnvironment,
    sampled: bool,
    state: TrainState,
    hyper: Hyper,
    _: tuple[()],
) -> Episode:
    """[E] episodes with the parameters and statistics a run has now."""
    del hyper
    # Training folds in the iteration first, so the two streams of keys never meet.
    key = jax.random.fold_in(jax.random.fold_in(state.key, 2**32 - 2), state.iteration)
    return evaluate(env, setup.agent, state.params, state.obs_stats, key, sampled)
