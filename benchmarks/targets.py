"""What each environment must reach, with the optimum and its source where one is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks import optima


@dataclass(frozen=True)
class Target:
    """A bar for the returns of several seeds.

    Attributes:
        at_least: for the mean over seeds.
        every_seed: for each seed.
        optimum: the mean must come 95% of the way from random to it.
        above_random: every seed must be above the 99th percentile of random policies.
        steps: of the training, where not as shipped.
        num_envs: of the training, where not as shipped.
        untrained: whether networks are measured before training, too, which takes long where they are large.
        games: the last so many of the training are the return, where a game is long, not an evaluation.
        others: what other trainers reach, for the README.
        note: for the table.
    """

    at_least: float | None = None
    every_seed: float | None = None
    optimum: float | None = None
    above_random: bool = False
    steps: int | None = None
    num_envs: int | None = None
    untrained: bool = True
    games: int = 0
    others: str = ""
    note: str = ""

    def bar(self, random_mean: float, random_p99: float) -> str:
        """The bar in words."""
        parts = []
        if self.at_least is not None:
            parts.append(f">= {self.at_least:g}")
        if self.every_seed is not None:
            parts.append(f"every seed > {self.every_seed:g}")
        if self.optimum is not None:
            parts.append(f">= {self._near_optimum(random_mean):.4g}, optimum {self.optimum:.4g}")
        if self.above_random:
            parts.append(f"every seed > {random_p99:.4g}")
        return ", ".join(parts) or "reported"

    def met(self, returns: np.ndarray, random_mean: float, random_p99: float) -> bool:
        """Whether the returns [seeds] reach it."""
        return bool(
            (self.at_least is None or returns.mean() >= self.at_least)
            and (self.every_seed is None or returns.min() > self.every_seed)
            and (self.optimum is None or returns.mean() >= self._near_optimum(random_mean))
            and (not self.above_random or returns.min() > random_p99)
        )

    def _near_optimum(self, random_mean: float) -> float:
        assert self.optimum is not None
        return random_mean + 0.95 * (self.optimum - random_mean)


GYMNAX = {
    "CartPole-v1": Target(
        at_least=495, every_seed=475, others="500, Gymnax, and the most there is"
    ),
    "Acrobot-v1": Target(at_least=-82, others="-80, Gymnax"),
    "Pendulum-v1": Target(at_least=-170, others="-130, Gymnax; -172, RL Zoo (100k steps)"),
    "MountainCar-v0": Target(at_least=-112, others="-110, RL Zoo; -118, Gymnax (250k steps)"),
    "MountainCarContinuous-v0": Target(at_least=93, others="92, Gymnax"),
    "Catch-bsuite": Target(optimum=1.0, note="Optimum: every ball can be caught (its source)."),
    "DeepSea-bsuite": Target(
        optimum=0.99, note="Optimum: 1 for the treasure less 0.01 for moving right (its source)."
    ),
    "FrozenLake-misc": Target(
        optimum=optima.frozen_lake(),
        note="Optimum: of 100 steps, by backward induction (benchmarks/optima.py).",
    ),
    "FourRooms-misc": Target(optimum=1.0, note="Optimum: the goal pays 1, once (its source)."),
    "UmbrellaChain-bsuite": Target(
        optimum=1.0,
        note="Optimum: 1 for the right umbrella; other rewards are noise of mean 0 (its source).",
    ),
    "DiscountingChain-bsuite": Target(
        optimum=1.1, note="Optimum: 1.1 for the best chain (its source)."
    ),
    "SimpleBandit-bsuite": Target(
        optimum=0.5,
        note="Gymnax draws the arms anew in every one-step episode and shows nothing, so 0.5 is "
        "the optimum and what random reaches.",
    ),
    "Reacher-misc": Target(above_random=True),
    "Swimmer-misc": Target(above_random=True),
    "PointRobot-misc": Target(above_random=True),
    "Pong-misc": Target(
        above_random=True,
        note="1 a step until a point is lost, at most 1,000; some untrained networks never lose one.",
    ),
    "MetaMaze-misc": Target(
        above_random=True,
        note="With a memory; eight seeds with `--gru-units none` reach 55.7.",
    ),
    "BernoulliBandit-misc": Target(
        optimum=optima.bernoulli_bandit()[1],
        note="With a memory; eight seeds with `--gru-units none` reach 80.6. Win-stay, lose-shift, which "
        f"needs none, reaches {optima.bernoulli_bandit()[0]:.1f} (benchmarks/optima.py).",
    ),
    "GaussianBandit-misc": Target(
        note="With a memory; of eight seeds with `--gru-units none` none tries the uncertain arm, which "
        f"once tried earns {optima.gaussian_bandit():.2f} (benchmarks/optima.py)."
    ),
    "MemoryChain-bsuite": Target(
        optimum=1.0,
        note="With a memory. Without one the answer is a guess, and every policy's mean is 0.",
    ),
}

# Others' after 10M steps, too.
MINATAR = {
    "Breakout-MinAtar": Target(at_least=40.0, others="28, Gymnax; 40, PureJaxRL"),
    "SpaceInvaders-MinAtar": Target(at_least=170.0, others="131, Gymnax; 170, PureJaxRL"),
    "Asterix-MinAtar": Target(at_least=15.0, others="15, Gymnax"),
    "Freeway-MinAtar": Target(at_least=60.0, others="58, Gymnax"),
}

OCTAX = {
    "octax/airplane": Target(above_random=True, steps=250_000),
    "octax/deep": Target(above_random=True, steps=250_000),
}

ENVPOOL = {
    "envpool/LunarLander-v3": Target(
        at_least=230.0,
        steps=1_000_000,
        others="242 +- 32, RL Zoo with these settings, of v2",
    ),
    "envpool/Pong-v5": Target(
        at_least=-10.0,
        steps=1_000_000,
        games=50,
        others="-18.1, one seed of Stable-Baselines3",
        note="Returns are means of the last 50 games of the training, of 1M steps instead of 10M.",
    ),
}

_CRAFTAX_1M = Target(
    above_random=True,
    steps=1_000_000,
    num_envs=64,
    untrained=False,
    note="Of 64 environments instead of 1,024, and 1M steps instead of a billion.",
)
CRAFTAX = {
    "craftax/Craftax-Classic-Symbolic-v1": _CRAFTAX_1M,
    "craftax/Craftax-Symbolic-v1": _CRAFTAX_1M,
}

XMINIGRID = {
    "xminigrid/MiniGrid-Empty-8x8": Target(
        optimum=1 - 0.9 * 11 / 256,
        note="Optimum: ten steps forward and a turn of the 256 there are.",
    ),
    "xminigrid/MiniGrid-DoorKey-8x8": Target(above_random=True),
    "xminigrid/MiniGrid-FourRooms": Target(above_random=True),
    "xminigrid/MiniGrid-MemoryS16": Target(
        above_random=True, note="Walking to one of the two ends without a look earns half."
    ),
}

SUITES = {
    "gymnax": GYMNAX,
    "minatar": MINATAR,
    "craftax": CRAFTAX,
    "octax": OCTAX,
    "xminigrid": XMINIGRID,
    "envpool": ENVPOOL,
}
