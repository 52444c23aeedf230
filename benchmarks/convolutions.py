"""Whole trainings with convolutions as products of patches, and with `flax.linen.Conv`, alternating.

python -m benchmarks.convolutions
python -m benchmarks.convolutions --env SpaceInvaders-MinAtar --repeats 5
"""

from __future__ import annotations

import argparse
import dataclasses
import platform

import flax.linen as nn
import jax
import numpy as np

from benchmarks.shared import RESULTS
from benchmarks.throughput import whole
from purejaxppo import convolutions, machine
from purejaxppo.config import RunOptions
from purejaxppo.envs import load_settings
from purejaxppo.train import make_setup


def flax_convolution(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Flax's own, in place of ours."""
    *size, _, features = kernel.shape
    conv = nn.Conv(features, size, stride, "VALID", use_bias=False)
    return conv.apply({"params": {"kernel": kernel}}, x)  # type: ignore[return-value]


def main() -> None:
    """Measures, and writes `results/convolutions.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="Breakout-MinAtar")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    machine.configure(RunOptions(compilation_cache=False), 1)
    settings = load_settings(given.env)
    convolutions.convolve_xla = flax_convolution
    rates: dict[str, list[float]] = {"patches": [], "xla": []}
    for _ in range(given.repeats):
        for name, each in rates.items():
            config = dataclasses.replace(settings.config, convolution=name)
            seconds = np.median(whole(make_setup(config), settings.hyper, repeats=1)["iteration"])
            each.append(config.batch_size / float(seconds))
    text = table(given.env, rates)
    (RESULTS / "convolutions.md").write_text(text)
    print(text)


def table(env: str, rates: dict[str, list[float]]) -> str:
    """The results as Markdown."""
    ratios = np.divide(rates["patches"], rates["xla"])
    lines = [
        "# Convolutions inside the training",
        "",
        f"Made by `python -m benchmarks.convolutions --env {env}`: {machine.device_name()}, "
        f"{platform.machine()}, jax {jax.__version__}. Steps/s of whole trainings of one run with the "
        "shipped settings, compilation left out, alternating:",
        "",
        "| convolution | steps/s |",
        "|---|---|",
        f"| products of patches | {', '.join(f'{rate:,.0f}' for rate in rates['patches'])} |",
        f"| `flax.linen.Conv` | {', '.join(f'{rate:,.0f}' for rate in rates['xla'])} |",
        "",
        f"Median of the ratios: {np.median(ratios):.1f} ({ratios.min():.1f} ... {ratios.max():.1f}).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
