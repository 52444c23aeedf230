"""Action distributions, one per kind of action space.

All share one interface. `draw_noise` draws what sampling needs, for a whole rollout at once and outside
the scan; `sample` is then a plain function of it. `sample` returns the action before clipping or
squashing, which is what a transition stores and `log_prob` is taken of; `to_env` makes of it what
the environment is given. Leading axes are free: `...` below.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from purejaxppo.spaces import Box, Discrete, MultiDiscrete, Space

_LOG_2PI = float(np.log(2 * np.pi))
# Most numbers in a row that are added up one by one, which XLA fuses with what is before and after: a
# reduction is a kernel of its own on a GPU. With eight a CPU takes longer so.
_FEW = 6


class Distribution(Protocol):
    """A batch of action distributions."""

    def sample(self, noise: Array) -> Array: ...
    def mode(self) -> Array: ...
    def log_prob(self, sample: Array) -> Array: ...
    def entropy(self, noise: Array) -> Array: ...
    def to_env(self, sample: Array) -> Array: ...


class Categorical(struct.PyTreeNode):
    """One choice among n."""

    logits: Array  # [..., n]

    def sample(self, noise: Array) -> Array:
        """[...] int32, by the Gumbel-max trick; noise is [..., n] Gumbel."""
        return Categorical(self.logits + noise).mode()

    def mode(self) -> Array:
        """[...] int32."""
        best, *others = _columns(self.logits)
        if not others:
            return jnp.argmax(best, axis=-1)
        choice = jnp.zeros(best.shape, jnp.int32)
        for i, logit in enumerate(others, 1):
            choice = jax.lax.select(logit > best, jnp.full_like(choice, i), choice)
            best = jnp.maximum(logit, best)
        return choice

    def log_prob(self, sample: Array) -> Array:
        """[...] of sample [...]."""
        chex.assert_shape(sample, self.logits.shape[:-1], custom_message="sample of log_prob")
        # Of all choices, as the gradient of an indexed lookup is a slow scatter.
        pairs = zip(_one_hot(sample, self.logits.shape[-1]), _log_softmax(self.logits), strict=True)
        return _sum(jax.lax.select(chosen, x, jnp.zeros_like(x)) for chosen, x in pairs)

    def entropy(self, noise: Array) -> Array:
        """[...] nats, exact."""
        del noise
        return -_sum(jnp.exp(x) * x for x in _log_softmax(self.logits))

    def to_env(self, sample: Array) -> Array:
        return sample


class MultiCategorical(struct.PyTreeNode):
    """Independent choices, the logits of all of them side by side."""

    logits: Array  # [..., sum(nvec)]
    nvec: tuple[int, ...] = struct.field(pytree_node=False)

    def _parts(self, array: Array) -> list[Array]:
        return jnp.split(array, np.cumsum(self.nvec)[:-1].tolist(), axis=-1)

    def _choices(self) -> list[Categorical]:
        return [Categorical(logits) for logits in self._parts(self.logits)]

    def sample(self, noise: Array) -> Array:
        """[..., A] int32; noise is [..., sum(nvec)] Gumbel."""
        drawn = zip(self._choices(), self._parts(noise), strict=True)
        return jnp.stack([choice.sample(part) for choice, part in drawn], axis=-1)

    def mode(self) -> Array:
        """[..., A] int32."""
        return jnp.stack([choice.mode() for choice in self._choices()], axis=-1)

    def log_prob(self, sample: Array) -> Array:
        """[...] of sample [..., A]."""
        return sum(
            (choice.log_prob(sample[..., i]) for i, choice in enumerate(self._choices())),
            start=jnp.zeros(sample.shape[:-1]),
        )

    def entropy(self, noise: Array) -> Array:
        """[...] nats, exact."""
        return sum(
            (choice.entropy(noise) for choice in self._choices()),
            start=jnp.zeros(self.logits.shape[:-1]),
        )

    def to_env(self, sample: Array) -> Array:
        return sample


class Gaussian(struct.PyTreeNode):
    """Diagonal Gaussian in the action's own units, clipped to the bounds for the environment."""

    mean: Array  # [..., A]
    log_std: Array  # [..., A]
    low: Array  # [A], may be -inf
    high: Array  # [A], may be inf

    def sample(self, noise: Array) -> Array:
        """[..., A], not clipped; noise is [..., A] standard normal."""
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> Array:
        """[..., A]."""
        return self.mean

    def log_prob(self, sample: Array) -> Array:
        """[...] log-density of sample [..., A], before clipping."""
        scaled = (sample - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * (jnp.square(scaled) + _LOG_2PI) - self.log_std, axis=-1)

    def entropy(self, noise: Array) -> Array:
        """[...] nats, exact for the sample before clipping."""
        del noise
        return jnp.sum(self.log_std + 0.5 * (1 + _LOG_2PI), axis=-1)

    def to_env(self, sample: Array) -> Array:
        return jnp.clip(sample, self.low, self.high)


class TanhGaussian(struct.PyTreeNode):
    """Diagonal Gaussian through tanh, stretched onto finite bounds (Haarnoja et al., 2018).

    `sample` and `mode` return the Gaussian's side, so no density is ever taken through `atanh`.
    """

    mean: Array  # [..., A] before tanh
    log_std: Array  # [..., A]
    low: Array  # [A]
    high: Array  # [A]

    def _base(self) -> Gaussian:
        return Gaussian(self.mean, self.log_std, self.low, self.high)

    def _log_slope(self, sample: Array) -> Array:
        """[...] log |d to_env / d sample|, stable for large samples."""
        log_tanh = 2 * (jnp.log(2.0) - sample - jax.nn.softplus(-2 * sample))
        half = jnp.where(self.low < self.high, (self.high - self.low) / 2, 1.0)  # or no choice
        return jnp.sum(log_tanh + jnp.log(half), axis=-1)

    def sample(self, noise: Array) -> Array:
        """[..., A] before tanh; noise is [..., A] standard normal."""
        return self._base().sample(noise)

    def mode(self) -> Array:
        """[..., A] before tanh: its image is the median of the squashed distribution."""
        return self.mean

    def log_prob(self, sample: Array) -> Array:
        """[...] log-density of the squashed action whose unsquashed sample [..., A] is given."""
        return self._base().log_prob(sample) - self._log_slope(sample)

    def entropy(self, noise: Array) -> Array:
        """[...] nats, estimated from the one sample that noise [..., A] draws."""
        base = self._base()
        return base.entropy(noise) + self._log_slope(base.sample(noise))

    def to_env(self, sample: Array) -> Array:
        action = self.low + (jnp.tanh(sample) + 1) * (self.high - self.low) / 2
        return jnp.clip(action, self.low, self.high)  # which rounding may have left


def _few(size: int) -> bool:
    return 1 < size <= _FEW


def _columns(x: Array) -> list[Array]:
    """Of [..., n] n arrays [...] if they are few, else that array alone."""
    axis, size = x.ndim - 1, x.shape[-1]
    if not _few(size):
        return [x]
    return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(size)]


def _one_hot(choice: Array, size: int) -> list[Array]:
    """`_columns` of [..., n] bool, whether each of n is the choice [...]."""
    if _few(size):
        return [choice == i for i in range(size)]
    return [choice[..., None] == jnp.arange(size)]


def _log_softmax(logits: Array) -> list[Array]:
    """`_columns` of [..., n]."""
    if not _few(logits.shape[-1]):
        return [jax.nn.log_softmax(logits)]
    columns = _columns(logits)
    largest = functools.reduce(jnp.maximum, map(jax.lax.stop_gradient, columns))
    shifted = [x - largest for x in columns]
    total = jnp.log(_sum(map(jnp.exp, shifted)))
    return [x - total for x in shifted]


def _sum(columns: Iterable[Array]) -> Array:
    """[...] of `_columns` of [..., n]."""
    first, *others = columns
    return functools.reduce(jnp.add, others, first) if others else jnp.sum(first, axis=-1)


def draw_noise(key: Array, space: Space, shape: tuple[int, ...]) -> Array:
    """What `sample` needs for a batch of `shape`; consumes key. See `noise_from_bits`."""
    return noise_from_bits(jax.random.bits(key, (*shape, num_outputs(space))), space)


def num_outputs(space: Space) -> int:
    """O, outputs of the policy head and random numbers of a sample: one a choice, or a dimension."""
    match space:
        case Discrete(n):
            return n
        case MultiDiscrete(nvec):
            return sum(nvec)
        case Box():
            return space.size


def noise_from_bits(bits: Array, space: Space) -> Array:
    """Gumbel noise for discrete choices, standard normal for a Box.

    Args:
        bits: [..., num_outputs(space)] uint32, uniform.

    Returns:
        float32 of the same shape.
    """
    # The middles of 2^23 intervals, so that neither 0 nor 1 comes up.
    uniform = (bits >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24
    if isinstance(space, Box):
        return jnp.sqrt(2.0) * jax.lax.erf_inv(2 * uniform - 1)
    return -jnp.log(-jnp.log(uniform))
