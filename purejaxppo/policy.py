"""A trained policy: parameters, statistics and configuration, always together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from purejaxppo import envs, machine
from purejaxppo.agent import Agent
from purejaxppo.checkpoint import finite
from purejaxppo.config import Config
from purejaxppo.distributions import draw_noise
from purejaxppo.envs.base import Environment
from purejaxppo.evaluate import evaluate, key_of
from purejaxppo.rundir import RunDirectory
from purejaxppo.stats import Moments
from purejaxppo.sweep import Run
from purejaxppo.train import make_setup, run_shapes, saved_shapes
from purejaxppo.types import Episode, PyTree, TrainState
from purejaxppo.values import ConfigError

# Episodes played side by side where environments live outside of the program.
_EXTERNAL_EPISODES = 16


@dataclass(frozen=True)
class Policy:
    """What a run has learned, as a function from observations to actions.

    Attributes:
        run: which of the run directory.
        params: without a leading axis.
        obs_stats: what observations are normalised with, None where they are not.
        iteration: after which it was like this.
    """

    run: Run
    env: Environment
    agent: Agent
    params: PyTree
    obs_stats: Moments | None
    iteration: int

    @property
    def config(self) -> Config:
        return self.run.setting.config

    def __call__(self, obs: np.ndarray | Array, key: Array | None = None) -> np.ndarray:
        """Actions as the environment takes them, of a policy without memory.

        Args:
            obs: [..., *observation_space.shape], as the agent's space has it: images grey, resized
                and stacked where the configuration says so.
            key: to sample with; without one, the most likely action.

        Returns:
            [..., *action_space.shape]

        Raises:
            ValueError: observations of another shape, or a policy with a memory.
        """
        _without_memory(self.agent)
        return self.step(obs, key=key)[0]

    def step(
        self,
        obs: np.ndarray | Array,
        memory: np.ndarray | None = None,
        key: Array | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions as calling the policy gives, and the memory after them; [..., 0] where there is none.

        Args:
            obs, key: likewise.
            memory: [..., H] what the step before gave, with zeros where an episode begins; None where all do.

        Raises:
            ValueError: observations or a memory of another shape.
        """
        shape, obs = self.agent.observation_space.shape, np.asarray(obs)
        batch, units = obs.shape[: obs.ndim - len(shape)], self.agent.network.gru_units
        if obs.shape != batch + shape:
            raise ValueError(f"observations {list(obs.shape)} do not end in {list(shape)}")
        before = np.zeros((*batch, units), np.float32) if memory is None else np.asarray(memory)
        if before.shape != (*batch, units):
            raise ValueError(f"a memory {list(before.shape)} is not {[*batch, units]}")
        flat, carry = obs.reshape(-1, *shape), before.reshape(-1, units) if units else ()
        nowhere = np.zeros(len(flat), bool)
        action, carry = _jitted(self.agent, self.params, self.obs_stats, flat, carry, nowhere, key)
        after = np.array(carry).reshape(before.shape) if units else before
        return np.asarray(action).reshape((*batch, *self.agent.action_space.shape)), after


def _without_memory(agent: Agent) -> None:
    """Raises ValueError where actions depend on more than the observation."""
    if agent.network.gru_units:
        raise ValueError("this policy has a memory, which is to be given again: see step")


def act(
    agent: Agent, params: PyTree, obs_stats: Moments | None, obs: Array, key: Array | None = None
) -> Array:
    """[B, *action_space.shape] actions for observations [B, ...], sampled where key is given.

    Raises:
        ValueError: the agent has a memory, or the observations are no batch.
    """
    _without_memory(agent)
    if obs.ndim == 0 or obs.shape[1:] != agent.observation_space.shape:
        size = ", ".join(["B", *map(str, agent.observation_space.shape)])
        raise ValueError(f"obs {list(obs.shape)}: must be [{size}]")
    return step(agent, params, obs_stats, obs, (), jnp.ones(obs.shape[0], bool), key)[0]


def step(
    agent: Agent,
    params: PyTree,
    obs_stats: Moments | None,
    obs: Array,
    carry: PyTree,
    first: Array,
    key: Array | None = None,
) -> tuple[Array, PyTree]:
    """What `act` gives, and the memory [B, H] after it.

    Args:
        carry: the memory before, see `Agent.init_carry`.
        first: [B] bool, the observation begins an episode: what was before is forgotten.
    """
    size = obs.shape[0]
    output = agent.apply(params, obs_stats, obs, carry, first)
    if key is None:
        action = output.policy.mode()
    else:
        action = output.policy.sample(draw_noise(key, agent.action_space, (size,)))
    return output.policy.to_env(action).reshape(size, *agent.action_space.shape), output.carry


_jitted = jax.jit(step, static_argnums=0)


def acting(state: TrainState) -> dict[str, PyTree]:
    """What of a state acts, as checkpoints have it."""
    return {"params": state.params, "obs_stats": state.obs_stats}


def load_policy(
    run_dir: str | Path, run: int | None = None, best: bool = False, env: str | None = None
) -> Policy:
    """The policy of a run directory.

    Args:
        run: its number, in a sweep.
        best: parameters with the best evaluation, not the latest; without `run`, the best run's.
        env: repeats `my_module:MyEnv`, as whose code it may run; not needed for other environments.

    Raises:
        ConfigError: not a run directory, no such run, no checkpoint, or a damaged one.
    """
    directory = RunDirectory.open(run_dir, env)
    number = directory.choose(run, best)
    program, place = directory.place(number)
    (policy,) = _load(directory, program, [place], best)
    if policy is None:
        hint = "" if best else "; --best has the last parameters that were good, if any"
        raise ConfigError(
            f"{directory.path}: {directory.programs[program][place].name} diverged{hint}"
        )
    return policy


def load_all_policies(directory: RunDirectory, best: bool) -> list[Policy]:
    """Of all runs but those that diverged or have not begun.

    Raises:
        ConfigError: that leaves none, or as `load_policy`.
    """
    begun = [i for i in range(len(directory.programs)) if directory.has_begun(i)]
    if not begun:
        directory.latest(0)  # which says why there is none
    loaded = [
        policy
        for program in begun
        for policy in _load(directory, program, range(len(directory.programs[program])), best)
        if policy is not None
    ]
    if not loaded:
        raise ConfigError(f"{directory.path}: all runs diverged")
    return loaded


def _load(
    directory: RunDirectory, program: int, places: Iterable[int], best: bool
) -> Iterator[Policy | None]:
    """The policies of runs by their places in a program; None of one that diverged."""
    machine.start_devices()
    runs = directory.programs[program]
    found, config = directory.latest(program), runs[0].setting.config
    env = envs.make(config.env, config.env_options)
    setup = make_setup(config, env)
    shapes = run_shapes(setup, runs[0].setting.hyper)
    saved = found.tree("best" if best else "state", saved_shapes(acting(shapes), len(runs)))
    iterations = found.arrays["best.iteration"] if best else [found.iteration] * len(runs)
    good = finite(saved["params"])
    for place in places:
        run, iteration = runs[place], int(iterations[place])
        if iteration < 0 or not good[place]:
            yield None
            continue
        own = jax.tree.map(lambda x, i=place: x[i], saved)
        yield Policy(run, env, setup.agent, own["params"], own["obs_stats"], iteration)


def play(policy: Policy, episodes: int, seed: int = 0, sampled: bool = False) -> Episode:
    """Host arrays [E] of whole episodes, always the same for a seed.

    `ended` is False for one without a time limit that was given up, and for one that an invalid step ended.
    """
    size = min(episodes, _EXTERNAL_EPISODES) if envs.is_external(policy.env) else episodes
    env = envs.vectorize(policy.config, policy.env, size, [seed])
    rounds = []
    for number in range(-(-episodes // size)):
        env.prepare()
        key = key_of(seed, number)
        played = _evaluate(env, policy.agent, policy.params, policy.obs_stats, key, sampled)
        rounds.append(jax.device_get(played))  # before the environments begin anew
    return jax.tree.map(lambda *x: np.concatenate(x)[:episodes], *rounds)


_evaluate = jax.jit(evaluate, static_argnums=(0, 1, 5))
