"""Sweeps: a batch of runs from grids and random searches, and statistics over what they reach."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

import jax
import numpy as np

from purejaxppo.config import Config, Hyper, RunOptions, Settings, our_name
from purejaxppo.convolutions import CNN_LAYERS
from purejaxppo.validation import validate
from purejaxppo.values import ConfigError, coerce, show_cnn_layers, suggest

# What a single sweep cannot compare, and why.
_NOT_SWEPT = {
    "env": "returns of different environments cannot be ranked; train each by itself",
    "env_args": "train each by itself",
    "backend": "returns of different physics cannot be ranked; train each by itself",
    "seed": "every setting has the same seeds; --num-seeds says how many",
}

# Options of several whole numbers.
_SIZES = ("torso_layers", "policy_layers", "value_layers", "resize")


_RANGES = ("uniform", "loguniform")
Draw = Callable[[np.random.Generator], float]


@dataclass(frozen=True)
class Setting:
    """One point of a sweep; without one, there is a single setting.

    Attributes:
        swept: name and value of what this setting has for itself.
    """

    swept: dict[str, Any]
    config: Config
    hyper: Hyper


def show(name: str, value: Any) -> str:
    """A value of a swept option as it is written on the command line, or what it says there."""
    if value == ():
        return {"cnn_layers": "flat", "torso_layers": "no layers"}.get(name, "none")
    if isinstance(value, tuple):
        layers = isinstance(value[0], tuple)
        return show_cnn_layers(value) if layers else "x".join(map(str, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def span(counts: Iterable[int]) -> str:
    """The least and the greatest number, or the only one."""
    ordered = sorted(set(counts))
    return " ... ".join(f"{count:,}" for count in dict.fromkeys((ordered[0], ordered[-1])))


def describe(swept: dict[str, Any]) -> str:
    """Swept options for a person to read."""
    return ", ".join(f"{name}={show(name, value)}" for name, value in swept.items())


@dataclass(frozen=True)
class Run:
    """One seed of a setting. Runs are numbered setting by setting, seeds innermost."""

    number: int
    seed: int
    setting: Setting

    @property
    def name(self) -> str:
        """For a person to read."""
        swept = self.setting.swept
        return f"run {self.number}, {describe(swept)}{', ' * bool(swept)}seed {self.seed}"


def make_settings_of(settings: Settings) -> list[Setting]:
    """Every combination of the values in `--sweep name=value,value`, for every random sample.

    Random samples depend on `--seed` alone.

    Raises:
        ConfigError: a name that cannot be swept, or a value that the option does not allow.
    """
    grid: dict[str, list[Any]] = {}
    ranges: dict[str, Draw] = {}
    for item in settings.run.sweep:
        name, sign, text = re.match(r"([^=~]*)([=~]?)(.*)", item, re.DOTALL).groups()  # type: ignore[union-attr]
        if not (name and sign and text):
            raise ConfigError(
                f"--sweep {item}: write name=value,value or name~loguniform(low,high)"
            )
        name = name.strip().removeprefix("--").replace("-", "_")
        _check_name(name, [*grid, *ranges])
        if sign == "=":
            grid[name] = _values(name, text)
        else:
            ranges[name] = _range(name, text)
    samples = _samples(ranges, settings.run)
    swept = [
        dict(zip(grid, values, strict=True)) | sample
        for sample in samples
        for values in itertools.product(*grid.values())
    ]
    return [_setting(settings, values) for values in swept]


def make_runs(settings: list[Setting], run: RunOptions) -> list[Run]:
    """The same seeds for every setting."""
    seeds = range(run.seed, run.seed + run.num_seeds)
    pairs = itertools.product(settings, seeds)
    return [Run(number, seed, setting) for number, (setting, seed) in enumerate(pairs)]


def programs(runs: list[Run]) -> list[list[Run]]:
    """The runs that share a compiled program: of equal `Config`, and with the same of `Hyper` at None."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        key = run.setting.config, jax.tree.structure(run.setting.hyper)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _check_name(name: str, before: list[str]) -> None:
    known = [n for n in (*get_type_hints(Config), *get_type_hints(Hyper)) if n not in _NOT_SWEPT]
    if name in _NOT_SWEPT:
        raise ConfigError(f"--sweep {name}: {_NOT_SWEPT[name]}")
    if name in get_type_hints(RunOptions):
        raise ConfigError(f"--sweep {name}: not part of the algorithm, so the same for every run")
    if name not in known:
        raise ConfigError(f"--sweep {name}: no such option{suggest(our_name(name), known, most=3)}")
    if name in before:
        raise ConfigError(f"--sweep {name}: given twice")


def _values(name: str, text: str) -> list[Any]:
    """Values separated by commas; widths of layers and sizes are written 64x64, convolutions by name."""
    hint = (get_type_hints(Config) | get_type_hints(Hyper))[name]
    values = []
    for part in text.split(","):
        part = part.strip()
        raw = {"none": None, "true": True, "false": False}.get(part, part)
        if name == "cnn_layers" and raw not in (None, *CNN_LAYERS):
            raise ConfigError(f"--sweep {name}={text}: must be of {', '.join(CNN_LAYERS)}, none")
        if name in ("policy_layers", "value_layers") and raw is None:
            raw = []
        elif raw is not None and name in _SIZES:
            raw = [width for width in part.split("x") if width]
        value = coerce(f"--sweep {name}", raw, hint)
        if value in values:
            raise ConfigError(f"--sweep {name}={text}: {part} is there twice")
        values.append(value)
    return values


def _range(name: str, text: str) -> Draw:
    match = re.fullmatch(r"\s*(\w+)\s*\(([^,]*),([^,]*)\)\s*", text)
    forms = " or ".join(f"{kind}(low,high)" for kind in _RANGES)
    if name not in get_type_hints(Hyper):
        raise ConfigError(
            f"--sweep {name}~{text}: compiles anew for every value; give a few, {name}="
        )
    if match is None:
        raise ConfigError(f"--sweep {name}~{text}: write {name}~{forms}")
    kind, *bounds = match.groups()
    if kind not in _RANGES:
        raise ConfigError(
            f"--sweep {name}~{kind}: no such distribution{suggest(kind, _RANGES)} ({forms})"
        )
    low, high = (coerce(f"--sweep {name}", bound.strip(), float) for bound in bounds)
    if not (-math.inf < low < high < math.inf) or (kind == "loguniform" and low <= 0):
        raise ConfigError(
            f"--sweep {name}~{text}: low must be below high{', above 0' * (kind == 'loguniform')}"
        )
    return functools.partial(_draw, kind == "loguniform", low, high)


def _draw(log: bool, low: float, high: float, rng: np.random.Generator) -> float:
    """One value, of six digits, so that it is the same wherever it is written."""
    value = math.exp(rng.uniform(math.log(low), math.log(high))) if log else rng.uniform(low, high)
    return min(max(float(f"{value:.6g}"), low), high)


def _samples(ranges: dict[str, Draw], run: RunOptions) -> list[dict[str, float]]:
    if ranges and run.samples is None:
        raise ConfigError(f"--sweep {next(iter(ranges))}~...: say how many, with --samples")
    if run.samples is not None and not ranges:
        raise ConfigError(
            f"--samples {run.samples}: nothing in --sweep is drawn, as name~... would be"
        )
    rng = np.random.default_rng(run.seed)
    drawn = range(run.samples or 1)
    return [{name: draw(rng) for name, draw in ranges.items()} for _ in drawn]


def _setting(settings: Settings, swept: dict[str, Any]) -> Setting:
    config = {n: value for n, value in swept.items() if n in Config.__dataclass_fields__}
    hyper = {name: value for name, value in swept.items() if name not in config}
    setting = Setting(
        swept,
        dataclasses.replace(settings.config, **config),
        settings.hyper.replace(**hyper),
    )
    validate(Settings(settings.run, setting.config, setting.hyper))
    return setting


@dataclass(frozen=True)
class Outcome:
    """What the n runs of a setting reached.

    Attributes:
        final: [n] return of the last evaluation in which an episode ended, or where none of any setting has
            been evaluated, of the last training episodes; NaN where none ended, and minus infinity for a run
            that diverged, which is the worst there is.
        area: [n] area under the learning curve, divided by the steps it covers.
    """

    swept: dict[str, Any]
    runs: list[int]
    seeds: list[int]
    env_steps: int
    diverged: np.ndarray  # [n] bool
    final: np.ndarray
    area: np.ndarray

    @property
    def score(self) -> tuple[float, ...]:
        """What settings are ranked by: final returns' interquartile mean and mean, then the area."""
        means = iqm(self.final), np.mean(self.final), iqm(self.area)
        return tuple(-math.inf if np.isnan(mean) else float(mean) for mean in means)

    def statistics(self) -> dict[str, Any]:
        """As `summary.json` has them; intervals are 95% bootstrap intervals over seeds."""
        return {
            # JSON has no infinity.
            "swept": {n: str(v) if v == math.inf else v for n, v in self.swept.items()},
            "runs": self.runs,
            "env_steps": self.env_steps,
            "iqm": float(iqm(self.final)),
            "iqm_interval": bootstrap_interval(self.final, iqm),
            "mean": float(np.mean(self.final)),
            "mean_interval": bootstrap_interval(self.final),
            "area_under_curve": float(iqm(self.area)),
            "diverged": int(self.diverged.sum()),
        }


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean (Agarwal et al., 2021): of what is left without a quarter at either end.

    As in rliable, the quarters are rounded down, so up to three runs are all counted. NaN where any is.
    """
    ordered = np.sort(np.moveaxis(np.asarray(values), axis, -1), axis=-1)
    size = ordered.shape[-1]
    middle = ordered[..., size // 4 : size - size // 4].mean(-1)
    return np.where(np.isnan(ordered[..., -1]), np.nan, middle)  # which sorting puts last


def bootstrap_interval(
    values: np.ndarray, statistic: Any = np.mean, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic over runs; always the same for the same values.

    NaN of a single run, which says nothing of others.

    Args:
        values: [n], or [S, n] for S strata, each of which is resampled by itself (Agarwal et al.).
        statistic: called as statistic(array [resamples, S * n], axis=-1).
    """
    strata = np.atleast_2d(values)
    if strata.shape[1] < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    index = rng.integers(0, strata.shape[1], (resamples, *strata.shape))
    samples = np.take_along_axis(strata[None], index, axis=-1).reshape(resamples, -1)
    # Without interpolation, which would make NaN of infinities.
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(statistic(samples, axis=-1), tails, method="inverted_cdf")
    return float(low), float(high)


def area_under_curve(steps: np.ndarray, returns: np.ndarray) -> float:
    """Mean height of a curve [S] over steps [S], by trapezoids; NaN without any points."""
    if len(steps) < 2:
        return float(returns[0]) if len(steps) else math.nan
    return float(np.trapezoid(returns, steps) / (steps[-1] - steps[0]))
