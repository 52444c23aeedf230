"""The pytrees that flow between modules, with a shape on every field.

Letters, here and everywhere: R runs, T steps of a rollout, N environments, B minibatch, A action
dimensions, K slots for final observations, P start states in a pool, D devices that share environments,
H numbers of a memory (of images: height).
"""

from __future__ import annotations

from typing import Any

from flax import struct
from jax import Array

PyTree = Any
Scalar = Array | float  # [], traced or not


class TimeStep(struct.PyTreeNode):
    """What a step did, before any reset is applied. A single environment has no [N]."""

    obs: Array  # [N, ...] the final observation where the episode ended
    reward: Array  # [N]
    terminated: Array  # [N] bool: the task ended, nothing is earned afterwards
    truncated: Array  # [N] bool: a time limit cut the episode short
    valid: Array | None = None  # [N] bool, False: not a real step; None: every step is real


class Episode(struct.PyTreeNode):
    """Statistics of an episode, meaningful where it ended: the game's own score."""

    ended: Array  # [N] bool
    score: Array  # [N] undiscounted sum of the environment's rewards; NaN where an invalid step did, not of EnvPool
    length: Array  # [N] int32, steps


class Transition(struct.PyTreeNode):
    """One step of experience as the loss reads it; [T, N] after a rollout, [B] in a minibatch."""

    obs: Array  # [T, N, ...] what was acted on
    first: Array  # [T, N] bool: obs begins an episode
    action: Array  # [T, N, ...] the sample before clipping or squashing
    noise: Array  # [T, N, ...] what the sample was drawn with
    log_prob: Array  # [T, N] of action, under the policy that acted
    value: Array  # [T, N] of obs, in the units of the scaled reward
    reward: Array  # [T, N] the environment's own
    terminated: Array  # [T, N] bool
    truncated: Array  # [T, N] bool
    valid: Array  # [T, N] bool


class Final(struct.PyTreeNode):
    """What the value after a time limit is taken of: the end of the episode truncated in window k."""

    obs: Array  # [K, N, ...] the final observation
    carry: PyTree  # [K, N, H] the memory before it, () without one


class Rollout(struct.PyTreeNode):
    """T steps of N environments."""

    transitions: Transition  # [T, N, ...]
    episodes: Episode  # [T, N]
    carry: PyTree  # [N, H] the memory that it began with, () without one
    final: Final  # [K, N, ...]


class TrainState(struct.PyTreeNode):
    """Everything an exact resume of one run needs, and only that."""

    params: PyTree
    opt_state: PyTree
    obs_stats: PyTree  # stats.Moments of observations, or None
    return_stats: PyTree  # stats.ReturnStats, or None
    env_state: PyTree
    first: Array  # [N] bool: the observation to act on begins an episode
    carry: PyTree  # [N, H] the memory of a network with a GRU, () without one
    key: Array  # [] made of the run's key; iteration i uses fold_in(key, i)
    iteration: Array  # [] int32


class Metrics(struct.PyTreeNode):
    """One iteration in numbers. Episode means are NaN where no episode ended, but by an invalid step.

    To add one: `losses.LossMetrics`, if it is of a minibatch, or `ppo.summarize`, and here.
    """

    episode_return: Array  # [] mean score of the episodes that ended
    episode_length: Array  # [] their mean length, steps
    episodes: Array  # [] int32, how many ended
    value_mean: Array  # [] in the environment's own units
    policy_loss: Array  # []
    value_loss: Array  # []
    entropy: Array  # [] nats
    approx_kl: Array  # [] nats, mean(ratio - 1 - log ratio)
    clip_fraction: Array  # []
    explained_variance: Array  # []
    grad_norm: Array  # [] before clipping
    learning_rate: Array  # [] the policy's
    invalid_steps: Array  # [] int32, steps left out (see TimeStep.valid)
