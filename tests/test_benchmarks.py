"""What decides whether a benchmark's bar is met, and optima with independent values."""

import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    accelerators,
    brax_ppo,
    budget,
    compare,
    external,
    learning,
    optima,
    scaling,
    throughput,
)
from benchmarks.targets import SUITES, Target
from purejaxppo import cli, envs
from purejaxppo.envs import load_settings
from purejaxppo.validation import validate


def test_bars():
    returns = np.array([90.0, 100.0])
    assert Target(at_least=95).met(returns, 0, 0)
    assert not Target(at_least=95.1).met(returns, 0, 0)
    assert not Target(at_least=95, every_seed=90).met(returns, 0, 0)
    assert Target(optimum=100).met(returns, 0, 0)
    assert not Target(optimum=101).met(returns, 0, 0)
    assert Target(above_random=True).met(returns, 0, 89.9)
    assert not Target(above_random=True).met(returns, 0, 90.0)


def test_suite_has_every_environment_it_should():
    assert set(SUITES["gymnax"]) == {
        name
        for name in envs.list_environments()
        if not any(part in name for part in ("MinAtar", "MNIST", "/"))
    }


def test_brax_gets_what_we_get():
    for task in brax_ppo.TASKS:
        settings = cli.parse(task.options())
        validate(settings)
        config, hyper = settings.config, settings.hyper
        samples = task.batch_size * task.num_minibatches * task.unroll_length
        assert (config.env, config.backend) == (f"brax/{task.env}", "spring")
        assert (config.batch_size, config.num_minibatches) == (samples, task.num_minibatches)
        assert (config.policy_layers, config.torso_layers) == (task.policy_layers, ())
        assert (hyper.gamma, hyper.reward_scale) == (task.gamma, task.reward_scale)
        assert config.normalize_observations
        assert not config.anneal_learning_rate
        if task.label:
            continue
        shipped = load_settings(config.env)  # which says that it was measured there
        assert (shipped.config, shipped.hyper) == (config, hyper)


@pytest.mark.parametrize(("advantage", "verdict"), [(0.0, "yes"), (-4.0, "yes"), (-6.0, "**no**")])
def test_at_or_above_brax_allows_a_twentieth(advantage, verdict):
    returns = [90.0, 100.0, 110.0]
    alone = {"steps_per_second": 3000.0, "compile_seconds": 9.0, "wall_seconds": 10.0}
    result = {
        "task": {"env": "hopper", "steps": 1000, "gamma": 0.99},
        "ours": alone | {"evaluations": [[1000, [r + advantage for r in returns]]]},
        "ours_alone": alone,
        "brax": [
            {"evaluations": [[1000, r]], "steps_per_second": 1000.0, "wall_seconds": 20.0}
            for r in returns
        ],
    }
    assert brax_ppo.difference_row(result).endswith(f"| {verdict} |")
    assert "| 3,000 | 3,000 | 1,000 | 3.00 | 3.00 |" in brax_ppo.steady_row(result)
    # One run in half of Brax's time, or three in that time, which is a sixth.
    assert "| 100 | 300 | 50 | 2.00 | 6.00 | 9 s |" in brax_ppo.end_to_end_row(result)


def test_frozen_lake_optimum_without_a_time_limit():
    """0.8235 (14/17) is the known optimum of the 4x4 lake when time is endless."""
    assert optima.frozen_lake(5000) == pytest.approx(14 / 17, abs=1e-3)
    assert optima.frozen_lake(100) == pytest.approx(0.744, abs=1e-3)


def test_bandits_by_simulation():
    rng = np.random.default_rng(0)
    good = rng.integers(0, 2, 20_000)
    arm, wins = np.zeros(20_000, int), 0.0
    for _ in range(100):
        won = rng.random(20_000) < np.where(arm == good, 0.9, 0.1)
        wins += won.mean()
        arm = np.where(won, arm, 1 - arm)
    assert optima.bernoulli_bandit()[0] == pytest.approx(wins, abs=0.3)
    assert optima.bernoulli_bandit(1) == (pytest.approx(0.5), pytest.approx(0.5))


def test_random_policies_are_measured():
    """Catch: the ball is caught by chance, 1 column in 5 for a paddle that wanders."""
    measured = learning.random_returns("Catch-bsuite", {})
    for mean, percentile in (measured["random"], measured["untrained"]):
        assert -1 < mean < percentile < 1


def test_what_is_not_measured_yet_is_no_row():
    result = {
        "env": "Catch-bsuite",
        "env_args": {},
        "steps": 100,
        "eval_episodes": 128,
        "returns": [1.0, 0.5],
        "versions": {"jax": "1", "gymnax": "2", "purejaxppo": "3"},
        "device": "a CPU",
    }
    complete = result | {"env": "CartPole-v1", "random": [20.0, 24.0]}
    text = learning.table("gymnax", [result, complete])
    assert "| CartPole-v1 |" in text
    assert "Catch" not in text
    assert learning.table("gymnax", [result]).endswith("|---|\n")


def test_seeds_that_are_added_later_say_what_trained_them():
    first = {"env_args": {}, "steps": 100, "eval_episodes": 128, "returns": [1.0, 0.5]}
    first |= {"versions": {"jax": "1", "gymnax": "2", "purejaxppo": "3"}, "device": "a CPU"}
    result = first | {"env": "CartPole-v1", "random": [20.0, 24.0]}
    learning.add_seeds(result, first | {"device": "another"})
    made = "a CPU, jax 1, gymnax 2, purejaxppo 3, or another, jax 1, gymnax 2, purejaxppo 3."
    assert made in learning.table("gymnax", [result])
    assert result["returns"] == [1.0, 0.5, 1.0, 0.5]


def test_curves_are_of_whole_episodes():
    rows = [
        {"run": run, "env_steps": steps, "episodes": count, "episode_return": value}
        for run, steps, count, value in [
            ("0", "100", "2", "1"),
            ("1", "100", "9", "9"),
            ("0", "200", "0", "nan"),
            ("0", "205", "1", "4"),
            ("0", "1000", "3", "8"),
        ]
    ]
    curve = learning.Curve.of(rows, 0)
    assert [curve.last(games) for games in (1, 3, 4, 5, 50)] == [8, 8, 7, 5, 5]
    assert curve.tenths(1000) == [1, None, 4, *[None] * 6, 8]


@pytest.mark.parametrize("env", budget.ENVIRONMENTS)
def test_what_is_compiled_has_not_grown(env):
    before = budget.baseline(env)
    if before is None:
        pytest.skip("there are no counts for this version of JAX")
    assert before["random_sites"] > 0
    assert budget.grown(budget.count(env), before) == []


def test_kernels_are_counted_in_loops():
    """Of a program as XLA prints it: whatever computes is one, as often as its loops go round."""
    text = """HloModule program
inner.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %copy.1 = f32[4]{0} copy(%p)
  ROOT %add = s32[] fusion(%copy.1), kind=kLoop, calls=%fused_add
}

%yes (p: f32[4]) -> f32[4] {
  ROOT %copy.2 = f32[4]{0} copy(%p)
}

%no.1 (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %w = (s32[], f32[4]{0}) while(%p), condition=%c, body=%inner.1, backend_config={"known_trip_count":{"n":"8"}}
  %u = (s32[], f32[4]{0}) while(%w), condition=%c, body=%inner.1
  %if = f32[4]{0} conditional(%u), branch_computations={%yes, %no.1}
  %all-reduce-start = f32[4]{0} all-reduce-start(%u), to_apply=%sum
  %all-reduce-done = f32[4]{0} all-reduce-done(%all-reduce-start)
}

ENTRY %main.5 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %conv = (f32[4]{0}, u8[0]{0}) custom-call(%p), custom_call_target="__cudnn$convForward"
  ROOT %w = (s32[], f32[4]{0}) while(%conv), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""
    whole = accelerators.read_loops(text)
    (body,) = whole.loops
    assert (body.times, body.kernels) == (3, 1)
    assert [loop.times for loop in body.loops] == [8, None, 1, 1]
    assert body.launched == 1 + 8 * 2 + 2 + 1
    assert whole.launched == 1 + 3 * body.launched


def test_a_tenth_is_allowed():
    assert budget.grown({"kernels": 110, "sorts": 0}, {"kernels": 100, "sorts": 0}) == []
    assert budget.grown({"kernels": 111}, {"kernels": 100}) == ["kernels 100 -> 111"]


def test_throughput_measures_every_part():
    found = throughput.measure("CartPole-v1", num_envs=2, num_steps=8, repeats=2)
    for part in ("iteration", "draw", "rollout", "advantages", "update"):
        assert len(found[part]) == 2
        assert min(found[part]) > 0
    assert found["steps_per_second"] == pytest.approx(16 / np.median(found["iteration"]))
    parts = (found[f"least_{part}"] for part in ("products", "activations", "bytes"))
    assert found["least_update"] == pytest.approx(sum(parts))
    assert "| CartPole-v1 |" in throughput.table([found])


def test_where_a_cpu_spends_its_time():
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 7, lambda _, x: jnp.tanh(x @ x), x))
    x = jnp.ones((64, 64))
    jax.block_until_ready(product(x))
    found = throughput.kernel_times(lambda: jax.block_until_ready(product(x)))
    assert 7 in [count for count, _ in found.values()]
    assert not [name for name in found if name.startswith(("while", "Thunk"))]
    seconds = [seconds for _, seconds in found.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < sum(seconds) < 1


def test_throughput_of_several_runs_is_not_taken_apart():
    found = throughput.measure("CartPole-v1", 2, 8, repeats=1, num_seeds=3, as_rejax=True)
    assert found["steps_per_second"] == pytest.approx(3 * 16 / found["iteration"][0])
    assert "update" not in found
    lines = throughput.table([found]).splitlines()
    (row,) = (line for line in lines if line.startswith("| CartPole-v1, as rejax |"))
    assert "| 3 | 2 x 8 |" in row


def test_every_trainer_does_the_same_work():
    for work in [*compare.WORKS, *compare.ACCELERATED]:
        command = compare.our_command(work, work.iterations(work.steps), Path("run"))
        settings = cli.parse(command[command.index("purejaxppo.run") + 1 :])
        validate(settings)
        config = settings.config
        assert (config.env, config.num_envs, settings.run.num_seeds) == (
            work.env,
            work.num_envs,
            work.num_runs,
        )
        assert (config.num_steps, config.update_epochs, config.num_minibatches) == (128, 4, 4)
        assert (config.torso_layers, config.activation) == ((64, 64), "tanh")
        assert config.policy_layers == config.value_layers == ()
        assert (config.shared_torso, config.normalize_observations) == (False, False)
        assert not config.normalize_rewards
        assert abs(config.total_timesteps * work.num_runs / work.steps - 1) < 0.02


def test_external_tasks_are_trained_as_the_other_trains_them(monkeypatch):
    asked = []
    monkeypatch.setattr(
        external.peers, "command", lambda _, peer, task: asked.append(task) or ["true"]
    )
    result = types.SimpleNamespace(stdout="100.0\n5.0\n")
    monkeypatch.setattr(external.subprocess, "run", lambda *_, **__: result)
    for task in external.TASKS:
        measured = external.theirs(task, 1000, 10_000, Path(), jobs=1)
        assert measured == external.Measured(steps_per_second=100.0, score=5.0)
        settings = load_settings(f"envpool/{task.name}")
        config, hyper, got = settings.config, settings.hyper, asked.pop()
        assert got["seed"] == 1000
        assert config.num_envs == got["num_envs"] == 8
        steps = got["num_steps"], got["batch_size"], got["epochs"]
        assert steps == ((256, 64, 10) if task.steps else (128, 256, 4))
        assert got["iterations"] + 1 == -(-10_000 // config.batch_size)
        assert got["atari"] == (not task.steps)
        shared = {"gamma": hyper.gamma, "gae_lambda": hyper.gae_lambda}
        assert got["hyper"] == shared | {"learning_rate": hyper.learning_rate}
        if task.steps:
            assert config.normalize_observations
            assert config.normalize_rewards
            # Its value loss is the mean of squares, ours half of it.
            assert (hyper.vf_coef, hyper.ent_coef) == (1.0, 0.0)
            assert hyper.clip_eps == 0.2
            assert not config.anneal_learning_rate


def test_external_returns_of_other_settings_are_forgotten():
    common = {"gamma": 0.99}
    known = {"returns": {"ours": {"1000": 7.0}, "theirs": {}}, "speeds": {"ours": [1.0]}}
    assert external.without_others(known | {"common": common}, common) == known | {"common": common}
    other = external.without_others(known | {"common": common}, {"gamma": 0.9})
    assert other["returns"] == {"ours": {}, "theirs": {}}
    assert other["speeds"] == known["speeds"]


def test_external_returns_that_are_known_are_not_measured_again():
    trained = []

    def train(task, seed, steps):
        trained.append((task.name, seed, steps))
        return external.Measured(steps_per_second=1.0, score=float(seed))

    known = {
        "Hopper-v5": {"returns": {"ours": {"1000": 7.0}}},
        "Breakout-v5": {"returns": {"ours": {}}},
    }
    saved = []
    save = lambda: saved.append(dict(known["Hopper-v5"]["returns"]["ours"]))  # noqa: E731
    external.measure_returns(known, {"ours": train}, seeds=3, jobs=1, save=save)
    assert trained == [("Hopper-v5", 1001, 1_000_000), ("Hopper-v5", 1002, 1_000_000)]
    assert saved[-1] == {"1000": 7.0, "1001": 1001.0, "1002": 1002.0}
    assert len(saved) == 2


def test_external_table_compares_at_equal_seeds():
    about = {
        "versions": {"jax": "1", "envpool": "2"},
        "device": "",
        "peer": {"stable-baselines3": "3"},
    }
    ours = {"1000": 9, "1001": 12, "1002": 9, "1003": 99}
    returns = {"ours": ours, "theirs": {"1002": 10, "1001": 10, "1000": 10}}
    speeds = {"ours": [50.0, 50.0], "theirs": [20.0, 30.0]}
    known = {"HalfCheetah-v5": {"returns": returns, "speeds": speeds} | about}
    (line,) = [x for x in external.table(known).splitlines() if x.startswith("| HalfCheetah")]
    assert "| 3 | 10 | 10 | 0 (-1 ... 2) | **no** | 50 | 25 | 2.0 | 5 |" in line
    ours["1000"] = ours["1002"] = 11
    assert "| 3 | 11 | 10 | 1 (1 ... 2) | yes |" in external.table(known)
    del ours["1000"]
    assert "| 2 | 12 | 10 | 2 (1 ... 2) | too few seeds |" in external.table(known)


def test_ratios_are_taken_pair_by_pair():
    work = {"aims": {"rejax": 2.0}, "speeds": {"ours": [10.0, 40.0, 30.0], "rejax": [10, 10, 10]}}
    start = {"seconds": {"first": [3.0, 4.0, 5.0], "rejax": [6.0, 8.0, 10.0]}}
    shown = compare.table({"a CPU": {"CartPole": work, compare.START_UP: start}})
    assert "| CartPole | 30 (10 ... 40) | rejax 10 (10 ... 10) | 3 | 2 |" in shown
    assert "| first | 4.0 (3.0 ... 5.0) | 0.50 |" in shown
    both = compare.table({"a CPU": {"CartPole": work}, "another": {"CartPole": work}})
    assert re.findall("On (.+):", both) == ["a CPU", "another"]


def test_linear_cost_doubles_with_every_doubling():
    points = {
        1: {"seconds": 1.0, "steps": 100.0},
        2: {"seconds": 1.0, "steps": 100.0},
        8: {"seconds": 4.0, "steps": 100.0},
    }
    assert scaling.growth(points) == {2: pytest.approx(2), 8: pytest.approx(4)}
