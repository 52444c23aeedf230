"""Learning results of the shipped configurations: trains every environment of a suite over eight
seeds (or --seeds) that nothing was tuned on, measures random policies the same way, and writes a table.

    python -m benchmarks.learning --suite gymnax
    python -m benchmarks.learning --suite gymnax --env CartPole-v1 --env Acrobot-v1
    python -m benchmarks.learning --suite minatar --seeds 4
    python -m benchmarks.learning --suite envpool --seeds 1 --env envpool/Pong-v5
    python -m benchmarks.learning --suite envpool --more 1 --env envpool/Pong-v5
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from benchmarks.shared import load, save, trained
from benchmarks.targets import SUITES, Target
from purejaxppo import envs
from purejaxppo.agent import AgentOutput
from purejaxppo.config import Config, Settings
from purejaxppo.envs import load_settings
from purejaxppo.evaluate import evaluate
from purejaxppo.plan import make_plan
from purejaxppo.spaces import Box
from purejaxppo.sweep import bootstrap_interval
from purejaxppo.train import Trainer, make_setup, stack_hypers

FIRST_SEED = 1000
RANDOM_POLICIES = 100


@dataclass(frozen=True)
class RandomPolicy:
    """Uniform actions, with the interface of a distribution and of an agent."""

    space: Any

    def apply(self, params: Any, obs_stats: Any, obs: Any, carry: Any, first: Any) -> Any:
        return AgentOutput(self, jnp.zeros(first.shape), carry)  # type: ignore[arg-type]

    def init_carry(self, num_envs: int) -> tuple[()]:
        return ()

    def sample(self, noise: jax.Array) -> jax.Array:
        if not isinstance(self.space, Box):
            return jnp.argmax(noise, axis=-1)
        low, high = (jnp.ravel(bound) for bound in self.space.bounds)
        return low + (high - low) * jax.scipy.stats.norm.cdf(noise)

    def to_env(self, sample: jax.Array) -> jax.Array:
        return sample


def random_returns(
    env_name: str, env_args: dict[str, Any], untrained: bool = True
) -> dict[str, list[float]]:
    """Mean and 99th percentile, over policies, of the mean return of their episodes.

    "random": uniform actions, which the bars refer to. "untrained", where asked for: actions of
    networks before training, taken as in the suite's evaluations, for comparison; where one constant action is good, some of these are.
    Not of environments outside of the program.
    """
    settings = load_settings(env_name)
    env = envs.make(env_name, env_args)
    measured = {"random": uniform_scores(settings.config, env, settings.run.eval_episodes)}
    if untrained and not envs.is_external(env):
        measured["untrained"] = untrained_scores(settings, env)
    return {
        name: [float(scores.mean()), float(np.quantile(scores, 0.99))]
        for name, scores in measured.items()
    }


def uniform_scores(config: Config, env: Any, episodes: int) -> np.ndarray:
    """Mean returns [RANDOM_POLICIES] of uniform actions."""
    uniform: Any = RandomPolicy(env.action_space)
    vector = envs.vectorize(config, env, episodes)

    def play(key: jax.Array) -> jax.Array:
        return evaluate(vector, uniform, None, None, key, sampled=True).score

    keys = jax.random.split(jax.random.key(7), RANDOM_POLICIES)
    if not vector.external:
        scores = jax.jit(lambda k: jax.lax.map(play, k, batch_size=4))(keys)
        return np.nanmean(scores, axis=1)
    one, scores = jax.jit(play), []
    for key in keys:
        vector.prepare()
        scores.append(np.nanmean(one(key)))
    return np.array(scores)


def untrained_scores(settings: Settings, env: Any) -> np.ndarray:
    """Mean returns [RANDOM_POLICIES] of networks before training."""
    setup = make_setup(settings.config, env)
    vector = envs.vectorize(settings.config, env, settings.run.eval_episodes)
    trainer = Trainer(
        setup, make_plan(setup, RANDOM_POLICIES, 4), vector, settings.run.eval_sampled
    )
    seeds = trainer.shard(np.arange(RANDOM_POLICIES, dtype=np.uint32))
    hypers = trainer.shard(stack_hypers([settings.hyper] * RANDOM_POLICIES))
    episodes = trainer.fetch(trainer.evaluate(trainer.init(seeds, hypers, ()), hypers, ()))
    return np.nanmean(episodes.score, axis=1)


def train(env_name: str, target: Target, num_seeds: int, first_seed: int) -> dict[str, Any]:
    """`outcome` of the command a user would type, with the benchmark's seeds."""
    options = ["--env", env_name, "--seed", first_seed, "--num-seeds", num_seeds, "--eval-every", 0]
    if target.steps:
        options += ["--total-timesteps", target.steps]
    if target.num_envs:
        options += ["--num-envs", target.num_envs]
    with trained(*options) as (run_dir, _):
        return outcome(run_dir, target)


def outcome(run_dir: Path, target: Target) -> dict[str, Any]:
    """What the files of a training say: its settings, and returns and curves of its seeds."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    with (run_dir / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    returns = summary["evaluation"]["return_per_run"]
    curves = [Curve.of(rows, run) for run in range(len(returns))]
    if target.games:
        returns = [curve.last(target.games) for curve in curves]
    return {
        "env_args": config["env_args"],
        "steps": config["total_timesteps"],
        "eval_episodes": summary["evaluation"]["episodes"],
        "returns": returns,
        "curves": [curve.tenths(config["total_timesteps"]) for curve in curves],
        "versions": summary["versions"],
        "device": summary["device"],
    }


@dataclass(frozen=True)
class Curve:
    """What a run's training says of itself: [rows] environment steps, episodes and their mean return."""

    env_steps: np.ndarray
    episodes: np.ndarray
    returns: np.ndarray

    @classmethod
    def of(cls, rows: list[dict[str, str]], run: int) -> Curve:
        """That of a run, from the rows of metrics.csv in which an episode ended."""
        own = [row for row in rows if int(row["run"]) == run and int(row["episodes"])]
        names = ("env_steps", "episodes", "episode_return")
        return cls(*(np.array([float(row[name]) for row in own]) for name in names))

    def last(self, games: int) -> float:
        """Mean return of the last episodes: so many, and what else ended in the first one's row."""
        later = np.cumsum(self.episodes[::-1])[::-1] - self.episodes  # after each row
        counted = np.where(later < games, self.episodes, 0)
        return float(np.average(self.returns, weights=counted))

    def tenths(self, steps: int) -> list[float | None]:
        """Mean return of the episodes that ended in each tenth of the training."""
        tenth = np.minimum(np.ceil(10 * self.env_steps / steps).astype(int), 10)
        return [
            float(np.average(self.returns[tenth == i], weights=self.episodes[tenth == i]))
            if np.any(tenth == i)
            else None
            for i in range(1, 11)
        ]


def add_seeds(result: dict[str, Any], further: dict[str, Any]) -> None:
    """Adds the `outcome` of further seeds to a measurement of the same training."""
    for name in ("env_args", "steps", "eval_episodes"):
        assert further[name] == result[name], f"{name}: {further[name]} is not {result[name]}"
    for name in {"returns", "curves"} & result.keys():  # older measurements have no curves
        result[name] += further[name]
    made = {name: further[name] for name in ("device", "versions")}
    result["further"] = [*result.get("further", []), made]


def met(result: dict[str, Any], target: Target) -> bool:
    """Whether a measurement reaches its bar."""
    return target.met(np.array(result["returns"]), *result["random"])


def table(suite: str, results: list[dict[str, Any]]) -> str:
    """The results as Markdown, of environments whose random policies are measured, too."""
    results = [r for r in results if "random" in r]
    trainings = (each for r in results for each in (r, *r.get("further", [])))
    made = ", or ".join(dict.fromkeys(_made_with(suite, each) for each in trainings))
    sampled = load_settings(next(iter(SUITES[suite]))).run.eval_sampled
    lines = [
        f"# Learning results, {suite}",
        "",
        f"Made by `python -m benchmarks.learning --suite {suite}`: the shipped configurations, seeds "
        f"from {FIRST_SEED} on, mean return of {'sampled' if sampled else 'deterministic'} evaluation "
        "episodes (128 where not said otherwise). The interval is a 95% bootstrap interval of the "
        f"mean over seeds. Random and untrained: mean, and 99th percentile, over {RANDOM_POLICIES} "
        "policies measured the same way, of uniform actions and of networks before training; those are not "
        "measured where they are outside of the program or large.",
        "",
        f"{made}.",
        "",
        "| environment | steps | seeds | mean | 95% interval | worst seed | random (p99) "
        "| untrained (p99) | bar | met | note |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        target, returns = SUITES[suite][r["env"]], np.array(r["returns"])
        args = "".join(f" {k}={v}" for k, v in r["env_args"].items())
        low, high = bootstrap_interval(returns)
        usual = r["eval_episodes"] == 128 or target.games
        episodes = "" if usual else f"{r['eval_episodes']:,} episodes a seed. "
        lines.append(
            f"| {r['env']}{args} | {r['steps']:,} | {len(returns)} | {returns.mean():.4g} | {low:.4g} ... {high:.4g} "
            f"| {returns.min():.4g} | {_pair(r['random'])} | {_pair(r.get('untrained'))} "
            f"| {target.bar(*r['random'])} | {'yes' if met(r, target) else '**no**'} "
            f"| {episodes}{target.note} |"
        )
    curved = [r for r in results if "curves" in r]
    if curved:
        lines += [
            "",
            "Mean return of the episodes that ended in each tenth of the training, with the actions that it "
            "took; a row a seed.",
            "",
            f"| environment | {' | '.join(f'{i}0%' for i in range(1, 11))} |",
            "|---" * 11 + "|",
        ]
    for r in curved:
        for curve in r["curves"]:
            cells = ["" if value is None else f"{value:.4g}" for value in curve]
            lines.append(f"| {r['env']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _made_with(suite: str, training: dict[str, Any]) -> str:
    """The machine and the versions of it."""
    versions = training["versions"]
    packages = "jax", suite if suite in versions else "gymnax", "purejaxppo"
    return ", ".join([training["device"], *(f"{name} {versions[name]}" for name in packages)])


def _pair(values: list[float] | None) -> str:
    return "{:.4g} ({:.4g})".format(*values) if values else ""


def main() -> int:
    """Runs the benchmark; returns 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES, default="gymnax")
    parser.add_argument("--env", action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--more", type=int, help="so many seeds beside those that are stored")
    parser.add_argument(
        "--random-only",
        action="store_true",
        help="keep the stored returns, measure random policies",
    )
    arguments = parser.parse_args()
    targets = SUITES[arguments.suite]
    known = {r["env"]: r for r in load(arguments.suite, [])}

    def store() -> None:
        ordered = [known[env] for env in targets if env in known]
        save(arguments.suite, ordered, table(arguments.suite, ordered))

    for name in arguments.env or targets:
        target = targets[name]
        if arguments.more:
            first = FIRST_SEED + len(known[name]["returns"])
            add_seeds(known[name], train(name, target, arguments.more, first))
        elif not arguments.random_only:
            known[name] = {"env": name} | train(name, target, arguments.seeds, FIRST_SEED)
            store()  # already, as random policies may take longer
        if "random" not in known[name] or arguments.random_only:
            args = known[name]["env_args"]
            known[name] |= random_returns(name, args, target.untrained)
        store()
        print(f"{name}: met {met(known[name], target)}", flush=True)
    return int(not all(met(known[name], targets[name]) for name in arguments.env or targets))


if __name__ == "__main__":
    sys.exit(main())
