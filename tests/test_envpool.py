"""Environments outside of the program: one pool for all runs, resets a step late, true scores."""

import dataclasses

import iterations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from iterations import jit
from PIL import Image, ImageSequence
from probes import Probe
from trainings import SMALL

from purejaxppo import cli, envs, machine, stats
from purejaxppo.config import Config, Hyper
from purejaxppo.convolutions import CNN_LAYERS
from purejaxppo.effort import compiler_options
from purejaxppo.envs import load_settings
from purejaxppo.envs.envpool import EnvPool, PoolState
from purejaxppo.policy import load_policy
from purejaxppo.policy import play as play_policy
from purejaxppo.spaces import Box, Discrete
from purejaxppo.train import as_arrays, make_setup, make_train
from purejaxppo.types import Episode, TimeStep
from purejaxppo.values import ConfigError

try:
    import envpool
except ImportError:
    envpool = None

needs_envpool = pytest.mark.skipif(envpool is None, reason="EnvPool is an extra")


def play(name, actions, seeds=(0,), num_envs=2, **arguments):
    """Host arrays of states before each step, time steps and episodes, each [T, R, N, ...]."""
    env = envs.vectorize(Config(num_envs=num_envs), envs.make(name, arguments), seeds=seeds)
    over_runs = jax.vmap if len(seeds) > 1 else lambda f: f
    axis = (len(seeds),) if len(seeds) > 1 else ()

    def run(key, actions):
        def step(state, action):
            after, timestep, episode = env.step(None, state, action)
            return after, (state, timestep, episode)

        return jax.lax.scan(step, env.reset(jax.random.split(key, num_envs)), actions)[1]

    keys = jax.random.split(jax.random.key(0), axis) if axis else jax.random.key(0)
    actions = jnp.broadcast_to(
        jnp.asarray(actions)[:, None], (len(actions), num_envs, *np.shape(actions)[1:])
    )
    actions = jnp.broadcast_to(actions, (*axis, *actions.shape))
    program = jit(over_runs(run))
    env.prepare()
    return jax.tree.map(np.asarray, program(keys, actions))


@needs_envpool
def test_an_environment_resets_one_step_late():
    states, timestep, episode = play("envpool/CartPole-v1", [0] * 40)
    ended = timestep.terminated | timestep.truncated
    assert ended.sum() >= 4
    np.testing.assert_array_equal(timestep.valid[1:], ~ended[:-1])
    assert timestep.valid[0].all()
    # What follows an end is acted on in vain: it is the final observation, and the next one a first.
    pole = np.abs(timestep.obs[..., 2])
    assert (pole[ended] > 0.2).all()
    late = ~timestep.valid
    np.testing.assert_array_equal(states.obs[1:][late[1:]], timestep.obs[:-1][late[1:]])
    assert (np.abs(timestep.obs[late]) < 0.051).all()
    assert not timestep.reward[late].any()
    # Scores and lengths are of real steps alone, and begin anew.
    np.testing.assert_array_equal(episode.ended, ended)
    for n in range(2):
        score = 0
        for t in range(40):
            score += timestep.valid[t, n]
            if ended[t, n]:
                assert episode.score[t, n] == episode.length[t, n] == score
                score = 0


@needs_envpool
def test_a_time_limit_truncates_and_a_fall_terminates():
    still, fall = np.zeros((12, 3)), np.ones((120, 3))
    _, timestep, episode = play("envpool/Hopper-v5", still, max_episode_steps=5)
    np.testing.assert_array_equal(timestep.truncated[:, 0], np.arange(12) % 6 == 4)
    assert not timestep.terminated.any()
    assert (episode.length[episode.ended] == 5).all()
    _, timestep, episode = play("envpool/Hopper-v5", fall)
    assert timestep.terminated.any()
    assert not timestep.truncated.any()
    assert timestep.obs.dtype == timestep.reward.dtype == np.float32


@needs_envpool
def test_runs_in_one_pool_are_what_each_is_alone():
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 6))
    together = play("envpool/HalfCheetah-v5", actions, seeds=(5, 6, 7))
    for i, seed in enumerate((5, 6, 7)):
        alone = play("envpool/HalfCheetah-v5", actions, seeds=(seed,))
        for a, b in zip(jax.tree.leaves(alone[1:]), jax.tree.leaves(together[1:]), strict=True):
            np.testing.assert_array_equal(a, b[i])
    assert (together[0].obs[0, 0] != together[0].obs[1, 0]).any()
    assert (together[0].obs[0, 0, 0] != together[0].obs[0, 0, 1]).any()


@needs_envpool
def test_atari_frames_are_bytes_with_channels_last_and_scores_are_the_games_own():
    fire_and_right = [1] + [2] * 60 + [1] + [3] * 238
    arguments = {"episodic_life": True, "reward_clip": True, "use_fire_reset": False}
    states, timestep, episode = play("envpool/Breakout-v5", fire_and_right, num_envs=4, **arguments)
    assert states.obs.shape == (300, 4, 84, 84, 4)
    assert states.obs.dtype == np.uint8
    np.testing.assert_array_equal(states.obs[10, :, ..., 2:4], states.obs[11, :, ..., 1:3])
    # Lives end episodes for learning, and only games are counted.
    assert timestep.terminated.sum() > episode.ended.sum()
    assert set(np.unique(timestep.reward)) <= {0.0, 1.0}


@needs_envpool
def test_a_clipped_reward_leaves_the_score_alone():
    _, timestep, episode = play("envpool/Asterix-v5", [2, 3, 4, 5] * 150, reward_clip=True)
    assert timestep.reward.max() == 1.0
    assert episode.ended.any()
    assert (episode.score[episode.ended] >= 50).any()


class LateState(struct.PyTreeNode):
    obs: jax.Array
    t: jax.Array
    lie: jax.Array


@dataclasses.dataclass(frozen=True)
class Late:
    """Two environments of three steps that earn 1 each; then a step that only resets, and may lie."""

    observation_space, action_space = Box(-9.0, 9.0, (1,)), Discrete(2)
    max_episode_steps, may_truncate, num_envs, external, pool_size = None, True, 2, True, 0

    def prepare(self):
        pass

    def reset(self, key):
        return LateState(jnp.zeros((2, 1)), jnp.zeros(2, jnp.int32), jnp.zeros(()))

    def begin_rollout(self, key, state):
        return state

    def end_rollout(self, state):
        return state

    def step(self, key, state, action):
        late = state.t == 3
        t = jnp.where(late, 0, state.t + 1)
        ended = t == 3
        obs = t.astype(jnp.float32)[:, None]
        reward = jnp.where(late, state.lie, 1.0)
        timestep = TimeStep(
            obs, reward, ended & (jnp.arange(2) == 0), ended & (jnp.arange(2) == 1), ~late
        )
        return (
            LateState(obs, t, state.lie),
            timestep,
            Episode(ended, jnp.full(2, 3.0), jnp.full(2, 3)),
        )


def begun_late(gru_units=None):
    """A training of such environments, before its first iteration."""
    config = Config(
        gru_units=gru_units,
        num_envs=2,
        num_steps=12,
        num_minibatches=2,
        update_epochs=2,
        torso_layers=(8,),
        normalize_observations=True,
        normalize_rewards=True,
    )
    setup = make_setup(config, Probe())._replace(env=Late())
    hyper = as_arrays(Hyper(learning_rate=0.01, gamma=0.5, gae_lambda=1.0))
    return setup, iterations.init(setup, jax.random.key(0), hyper), hyper


@pytest.mark.parametrize("gru_units", [None, 4])
def test_a_late_reset_counts_for_nothing(gru_units):
    setup, begun, hyper = begun_late(gru_units)
    state, metrics = iterations.iterate(setup, begun, hyper, 10.0)
    lying = begun.replace(env_state=begun.env_state.replace(lie=jnp.float32(1e6)))
    other, others = iterations.iterate(setup, lying, hyper, 10.0)
    for a, b in zip(
        jax.tree.leaves((state.params, state.obs_stats, state.return_stats, metrics)),
        jax.tree.leaves((other.params, other.obs_stats, other.return_stats, others)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert metrics.invalid_steps == 2 * 3
    assert (metrics.episodes, metrics.episode_length) == (6, 3)
    # What is seen in such a step is a final observation, 3, and no statistics have it.
    np.testing.assert_allclose(state.obs_stats.mean, 1.0, rtol=1e-6)
    assert state.obs_stats.count == 18


def test_an_episode_begins_after_the_late_reset():
    setup, state, _ = begun_late()
    steps = iterations.rollout(setup, state, jax.random.key(1))[1].transitions
    np.testing.assert_array_equal(steps.first, steps.obs[..., 0] == 0)  # the final one shows 3
    assert steps.first.sum() == 2 * 3


def test_a_truncation_is_valued_by_what_is_acted_on_in_vain():
    setup, state, hyper = begun_late()
    after, data = iterations.rollout(setup, state, jax.random.key(1))
    advantage = np.asarray(iterations.advantages(setup, after, data, hyper))
    steps = data.transitions
    value = np.asarray(steps.value)
    scale = float(stats.return_scale(state.return_stats))
    for n, bootstrap in ((0, 0.0), (1, value[3, 1])):
        expected = 1 / scale + 0.5 * bootstrap - value[2, n]
        np.testing.assert_allclose(advantage[2, n], expected, rtol=1e-5)
        earlier = 1 / scale + 0.5 * value[2, n] - value[1, n] + 0.5 * expected
        np.testing.assert_allclose(advantage[1, n], earlier, rtol=1e-5)
    assert data.final.obs.shape[0] == 0


@needs_envpool
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("envpool/Pomg-v5", {}, "EnvPool has no 'Pomg-v5'; did you mean Pong-v5"),
        ("envpool/Pong-v5", {"frame_skip": "x"}, "--env-args frame_skip=x: must be a number"),
        ("envpool/Pong-v5", {"frame_skip": 2.5}, "incompatible constructor arguments.$"),
        ("envpool/Pong-v5", {"frameskip": 4}, "no argument 'frameskip'; did you mean frame_skip"),
        ("envpool/Pong-v5", {"num_envs": 4}, "no argument 'num_envs'"),
        ("envpool/MiniGrid-Unlock-v0", {}, "MiniGrid-Unlock-v0: spaces of the kind Dict"),
        ("envpool/IntersectionMultiAgent-v1", {}, "several agents are not supported"),
    ],
)
def test_what_there_is_not_is_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        envs.make(name, arguments)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"pip install 'purejaxppo\[envpool\]'"):
        envs.make("envpool/Pong-v5")


@needs_envpool
def test_a_pure_function_cannot_hold_a_pool():
    with pytest.raises(ConfigError, match="envpool/CartPole-v1 lives outside of the program"):
        make_train(Config(env="envpool/CartPole-v1"))


@needs_envpool
def test_atari_trains_on_pixels(tmp_path):
    options = (
        "--env envpool/Pong-v5 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1"
    )
    options += " --total-timesteps 32 --eval-episodes 1 --env-args max_episode_steps=6 --run-dir"
    assert cli.train_command([*options.split(), str(tmp_path / "run")]) == 0
    config = load_settings(file=tmp_path / "run" / "config.yaml")
    assert (config.hyper.value_clip_eps, config.hyper.reward_clip) == (0.1, 1.0)
    policy = load_policy(tmp_path / "run")
    assert policy.agent.network.cnn_layers == CNN_LAYERS["nature"]
    assert policy(np.zeros((3, 84, 84, 4), np.uint8)).shape == (3,)


@needs_envpool
@pytest.mark.on_cpus
@pytest.mark.parametrize(
    ("env", "cores", "all_cores"),
    [("Pong-v5", 2, True), ("Pong-v5", 1, False), ("CartPole-v1", 2, False)],
)
def test_products_of_convolutions_are_split_over_cores(monkeypatch, env, cores, all_cores):
    monkeypatch.setattr(machine, "num_cores", lambda: cores)
    setup = make_setup(load_settings(f"envpool/{env}").config)
    options = compiler_options(setup)
    assert options["xla_backend_optimization_level"] == 1
    assert ("xla_cpu_experimental_ynn_fusion_type" in options) == all_cores
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile(options)
    np.testing.assert_array_equal(compiled(jnp.ones((8, 8))), 8.0)


@needs_envpool
def test_colours_become_small_grey_stacks_where_the_configuration_says_so():
    settings = load_settings("envpool/CarRacing-v3")
    config = dataclasses.replace(settings.config, num_envs=2)
    env = envs.vectorize(config, envs.make(config.env))
    assert env.observation_space.shape == (64, 64, 2)
    left_and_gas = jnp.tile(jnp.array([-1.0, 1.0, 0.0]), (2, 1))

    def step(state, _):
        state, timestep, _ = env.step(None, state, left_and_gas)
        return state, timestep.obs

    program = jit(lambda key: jax.lax.scan(step, env.reset(jax.random.split(key, 2)), length=60)[1])
    env.prepare()
    obs = np.asarray(program(jax.random.key(0)))
    assert obs.dtype == np.uint8
    np.testing.assert_array_equal(obs[:-1, ..., 1], obs[1:, ..., 0])
    assert (obs[-1, ..., 0] != obs[-1, ..., 1]).mean() > 0.1  # the car drives
    assert obs.mean(axis=(2, 3, 4)).min() > 50  # grass and road, not nothing


@needs_envpool
def test_games_are_filmed_in_their_own_colours(tmp_path):
    run_dir = tmp_path / "run"
    options = "--env envpool/Breakout-v5 --num-envs 2 --num-steps 8 --num-minibatches 2 --cnn-layers 4x8x8"
    options += (
        " --torso-layers 8 --update-epochs 1 --total-timesteps 16 --eval-episodes 1 --run-dir"
    )
    arguments = ["--env-args", "max_episode_steps=30", "--seed", "3"]
    assert cli.train_command([*options.split(), str(run_dir), *arguments]) == 0
    assert cli.render_command([str(run_dir), "--episodes", "2"]) == 0
    with Image.open(run_dir / "videos" / "run0.gif") as film:
        frames = [np.asarray(f.convert("RGB")) for f in ImageSequence.Iterator(film)]
    assert frames[0].shape == (210 + 24, 320, 3)
    assert 4 <= len(frames) <= 2 * 32
    game = frames[0][24:, 80:240]
    assert len(np.unique(game.reshape(-1, 3), axis=0)) >= 6  # rows of bricks
    assert (frames[0] != frames[-2]).any()


@needs_envpool
def test_an_environment_without_a_limit_is_given_up_like_others():
    assert envs.make("envpool/CliffWalking-v1").max_episode_steps is None


@needs_envpool
def test_arguments_lie_over_those_of_the_configuration():
    arguments = ["--env", "envpool/Pong-v5", "--env-args", "repeat_action_probability=0.25"]
    got = dict(cli.parse(arguments).config.env_args)
    assert got == {"episodic_life": True, "repeat_action_probability": 0.25}
    arguments[-1] = "episodic_life=false"
    assert dict(cli.parse(arguments).config.env_args) == {"episodic_life": False}


@needs_envpool
@pytest.mark.parametrize(("task", "mib"), [("Pong-v5", 2), ("MetaWorld/FaucetOpen-v3", 22)])
def test_the_memory_of_an_environment_is_that_of_its_suite(task, mib):
    assert envs.make(f"envpool/{task}").host_bytes == mib * 2**20


@needs_envpool
def test_programs_of_a_sweep_share_the_memory(tmp_path, capsys, monkeypatch):
    """Each has its pool from the start: one of these fits, and not both."""
    monkeypatch.setattr(machine, "_available_bytes", lambda: 3 * 2**30)
    words = [*SMALL.split(), "--env", "envpool/CartPole-v1", "--eval-episodes", "1000"]
    words += ["--sweep", "num_steps=16,32", "--run-dir", str(tmp_path / "run")]
    assert cli.train_command(words) == 2
    error = capsys.readouterr().err
    assert (
        "the environments of envpool/CartPole-v1 need 1.96 GiB, and there is room for 1.0" in error
    )
    assert not (tmp_path / "run").exists()


@needs_envpool
def test_what_a_pool_itself_refuses_is_one_line(tmp_path, capsys):
    words = [*SMALL.split(), "--env", "envpool/Hopper-v5", "--env-args", "xml_file=nowhere.xml"]
    assert cli.train_command([*words, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("purejaxppo: error: envpool/Hopper-v5: ")
    assert error.count("\n") == 1


@needs_envpool
def test_what_cannot_be_filmed_is_said_before_it_is_trained(tmp_path, capsys):
    options = "--env envpool/FrozenLake-v1 --video-every 100 --run-dir"
    assert cli.train_command([*options.split(), str(tmp_path / "run")]) == 2
    assert "envpool/FrozenLake-v1 cannot be drawn here: " in capsys.readouterr().err


@needs_envpool
def test_a_training_and_its_resumption(tmp_path, capsys, monkeypatch):
    run_dir = str(tmp_path / "run")
    options = [*SMALL.split(), "--env", "envpool/Acrobot-v1", "--env-args", "max_episode_steps=20"]
    options += ["--num-seeds", "2", "--eval-episodes", "3", "--run-dir", run_dir]
    assert (
        cli.train_command([*options, "--total-timesteps", "64", "--no-anneal-learning-rate"]) == 0
    )
    out = capsys.readouterr().out
    assert "environments step in C++ threads" in out
    words = []
    seeded = envpool.make
    monkeypatch.setattr(envpool, "make", lambda *a, **k: words.append(k["seed"]) or seeded(*a, **k))
    for steps in ("96", "128"):
        assert cli.train_command(["--resume", run_dir, "--total-timesteps", steps]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "not bit for bit: environments outside of the program begin anew" in said
    assert len(words) == 4  # to train and to evaluate, each time with others
    assert len({word for seeds in words for word in seeds}) == sum(map(len, words))
    assert cli.evaluate_command([run_dir, "--episodes", "3"]) == 0
    assert play_policy(load_policy(run_dir, run=1), 20).ended.sum() == 20  # in two rounds


@needs_envpool
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--shard environments",
            "--shard environments: the environments of envpool/Acrobot-v1 live",
        ),
        ("--num-seeds 4 --runs-per-block 2", "--runs-per-block 2: the environments"),
        (
            "--num-envs 100000 --memory-limit 8GiB",
            "envpool/Acrobot-v1 need 195.56 GiB, and there is",
        ),
        ("--reset-mode fresh", "envpool/Acrobot-v1 reset themselves"),
        ("--pool-size 3", "--pool-size 3: the environments of envpool/Acrobot-v1 reset themselves"),
    ],
)
def test_what_they_cannot_do_is_refused(options, message, tmp_path, capsys):
    arguments = [*SMALL.split(), "--env", "envpool/Acrobot-v1", *options.split()]
    assert cli.train_command([*arguments, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_is_no_number_ends_no_game():
    """It ends an episode of learning; the pool knows nothing of it, and its next step is a real one."""
    space = Box(-1.0, 1.0, (1,), "float32")
    env = EnvPool("Fake-v0", {}, space, Discrete(2), None, num_envs=1)
    one, no = jnp.ones(1), jnp.zeros(1, bool)

    def act(handle, action):
        obs = jnp.where(action == 1, jnp.nan, 0.0)[:, None]
        return handle, (TimeStep(obs, one, no, no), Episode(no, one, one))

    env.__dict__["_calls"] = jnp.zeros(8, jnp.uint8), None, act
    zeros = jnp.zeros(1)
    state = PoolState(env._calls[0], zeros[:, None], zeros, zeros.astype(int), no)
    seen = []
    for action in (0, 1, 0):
        state, timestep, _ = env.step(None, state, jnp.full(1, action))
        seen.append((bool(timestep.valid[0]), bool(timestep.terminated[0])))
    assert seen == [(True, False), (False, True), (True, False)]
    assert (state.score, state.length) == (3, 3)


@needs_envpool
@pytest.mark.parametrize("kind", [ImportError, RuntimeError])
def test_what_cannot_be_made_is_one_line(kind, capsys, monkeypatch):
    """As without a library that a suite needs, or a file."""

    def fail(*_, **__):
        raise kind("There is no\n  library of that name.")

    monkeypatch.setattr(envpool, "make_spec", fail)
    assert cli.train_command(["--env", "envpool/Pong-v5"]) == 2
    message = "purejaxppo: error: envpool/Pong-v5: There is no library of that name.\n"
    assert capsys.readouterr().err == message
