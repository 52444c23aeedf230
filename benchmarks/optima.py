"""The best returns that a policy can have where they are not obvious, by dynamic programming."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

_LAKE = "SFFFFHFHFFFHHFFG"
_DIRECTIONS = ((0, -1), (1, 0), (0, 1), (-1, 0))


def frozen_lake(steps: int = 100) -> float:
    """Chance to reach the goal of the slippery 4x4 lake in so many steps, by backward induction.

    It is that of a policy that knows how much time is left. One that sees only its position, as
    the observation has it, can at most equal it.
    """
    value = np.zeros(16)
    for _ in range(steps):
        value = np.array([_lake_value(value, position) for position in range(16)])
    return float(value[0])


def _lake_value(value: np.ndarray, position: int) -> float:
    if _LAKE[position] in "HG":
        return 0.0
    outcomes = []
    for row_step, column_step in _DIRECTIONS:
        row = min(max(position // 4 + row_step, 0), 3)
        column = min(max(position % 4 + column_step, 0), 3)
        to = row * 4 + column
        outcomes.append(1.0 if _LAKE[to] == "G" else value[to])
    return max(sum(outcomes[(a + turn) % 4] for turn in (-1, 0, 1)) / 3 for a in range(4))


def bernoulli_bandit(steps: int = 100, good: float = 0.9) -> tuple[float, float]:
    """Expected returns with two arms that pay with chance good and 1 - good.

    Returns:
        Of win-stay, lose-shift, which needs only the last action and reward, as observed; and of
        always pulling the arm that is likelier to be the good one, which needs memory and by
        symmetry is optimal.
    """
    on_good, stay = 0.5, 0.0
    for _ in range(steps):
        stay += on_good * good + (1 - on_good) * (1 - good)
        on_good = on_good * good + (1 - on_good) * good
    # Evidence for the first arm in units of log(good / (1 - good)): a walk that pulls the favourite.
    chances, remember = {0: 1.0}, 0.0
    odds = good / (1 - good)
    for _ in range(steps):
        following: dict[int, float] = {}
        for evidence, chance in chances.items():
            favourite = odds ** abs(evidence) / (1 + odds ** abs(evidence))
            pays = favourite * good + (1 - favourite) * (1 - good)
            remember += chance * pays
            sign = 1 if evidence >= 0 else -1
            for step, p in ((sign, pays), (-sign, 1 - pays)):
                following[evidence + step] = following.get(evidence + step, 0.0) + chance * p
        chances = following
    return stay, remember


def gaussian_bandit(steps: int = 100) -> float:
    """Expected return of pulling the uncertain arm once, then always the better one.

    Its mean is normal with mean -1 and deviation 1, and the other arm pays 0. What the last step
    showed is nearly enough to know the better arm (rewards have a deviation of only 0.1).
    """
    normal = NormalDist()
    return -1.0 + (steps - 1) * (normal.pdf(1.0) - normal.cdf(-1.0))


if __name__ == "__main__":
    print(f"FrozenLake 4x4, 100 steps: {frozen_lake():.4f}")
    print("BernoulliBandit without, with memory: {:.2f}, {:.2f}".format(*bernoulli_bandit()))
    print(f"GaussianBandit: {gaussian_bandit():.2f}")
