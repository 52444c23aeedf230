"""Action and observation spaces: static and hashable, so they may decide what is compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Discrete:
    """Whole numbers 0 ... n - 1, one int32."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    def __str__(self) -> str:
        return f"Discrete({self.n})"


@dataclass(frozen=True)
class MultiDiscrete:
    """A vector of whole numbers; entry i lies in 0 ... nvec[i] - 1."""

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvec", tuple(map(int, self.nvec)))  # of a list or an array, too

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    def __str__(self) -> str:
        return f"MultiDiscrete({list(self.nvec)})"


@dataclass(frozen=True)
class Box:
    """Arrays of one shape between two bounds, each a number or, as given or in C order, one for each entry."""

    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        shape = tuple(map(int, np.atleast_1d(self.shape)))  # of a list or a number, too
        object.__setattr__(self, "shape", shape)
        for name in ("low", "high"):
            bound = np.asarray(getattr(self, name), np.float64)
            if bound.ndim and bound.size != math.prod(shape):
                raise ValueError(
                    f"Box: {name} has {bound.size} numbers for the shape {list(shape)}"
                )
            plain = tuple(bound.ravel().tolist()) if bound.ndim else float(bound)
            object.__setattr__(self, name, plain)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bound, each float32 of `shape`; as large as float32 goes means no bound."""
        return self._full(self.low), self._full(self.high)

    def _full(self, bound: float | tuple[float, ...]) -> np.ndarray:
        array = np.asarray(bound, np.float64)
        if array.ndim:
            array = array.reshape(self.shape)
        unbounded = np.abs(array) >= np.finfo(np.float32).max
        array = np.where(unbounded, np.copysign(np.inf, array), array).astype(np.float32)
        return np.broadcast_to(array, self.shape)

    @property
    def center_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Middle and half the width, each float32 of `shape`.

        Where a bound is missing the middle is the number in the box that is nearest to 0, and the
        scale 1, as it is where there is no width.
        """
        low, high = (
            bound.astype(np.float64) for bound in self.bounds
        )  # in which no width overflows
        bounded = np.isfinite(low) & np.isfinite(high)
        nearest = np.clip(0.0, low, high)
        low, high = np.where(bounded, low, nearest - 1), np.where(bounded, high, nearest + 1)
        center, scale = (low + high) / 2, np.where(low < high, (high - low) / 2, 1.0)
        return center.astype(np.float32), scale.astype(np.float32)

    def __str__(self) -> str:
        low, high = self.bounds
        limits = f"{low.min():g} ... {high.max():g}" if self.size else "empty"
        return f"Box({list(self.shape)}, {limits}, {self.dtype})"


Space = Discrete | MultiDiscrete | Box
