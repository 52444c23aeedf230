"""Vectorisation, resets, clock, episode statistics, and finding environments by name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces as gymnax_spaces

from purejaxppo import envs
from purejaxppo.envs import Vectorized
from purejaxppo.envs.base import finite_start
from purejaxppo.spaces import Box, Discrete
from purejaxppo.types import TimeStep
from purejaxppo.values import ConfigError


class Countdown:
    """Starts at a random number, shown as observation; each step pays it and counts down to 0."""

    observation_space = Box(0.0, 100.0, (1,))
    action_space = Discrete(2)
    may_truncate = False

    def __init__(self, limit=None, highest=6):
        self.max_episode_steps = limit
        self.highest = highest

    def reset(self, key):
        start = jax.random.randint(key, (), 2, self.highest)
        return start, start[None].astype(jnp.float32)

    def step(self, key, state, action):
        state = state - 1
        return state, TimeStep(
            state[None].astype(jnp.float32), state + 1, state == 0, jnp.zeros((), bool)
        )


def keys(seed, *shape):
    return jax.random.split(jax.random.key(seed), shape)


def play(env, steps, key=0, rollouts=1):
    """Observations acted on, time steps, episodes of `rollouts` rollouts, as numpy [T, N]."""

    def step(state, key):
        obs = state.obs
        state, timestep, episode = env.step(
            jax.random.split(key, env.num_envs), state, jnp.zeros(env.num_envs, jnp.int32)
        )
        return state, (obs, timestep, episode)

    @jax.jit
    def rollout(state, key):
        starts = jax.random.split(key, (env.pool_size, env.num_envs))
        state = finite_start(env.begin_rollout(starts, state))
        state, data = jax.lax.scan(step, state, jax.random.split(key, steps))
        return env.end_rollout(state), data

    state, out = env.reset(keys(key, env.num_envs)), []
    for i in range(rollouts):
        state, data = rollout(state, jax.random.key(key + 1 + i))
        out.append(data)
    return jax.tree.map(lambda *x: np.concatenate(x), *out)


@pytest.mark.parametrize("pool_size", [8, 0])
def test_episodes_follow_one_another(pool_size):
    obs, timestep, episode = play(Vectorized(Countdown(), 3, pool_size), steps=40)
    for n in range(3):
        score = length = 0
        for t in range(40):
            score, length = score + obs[t, n, 0], length + 1
            assert timestep.reward[t, n] == obs[t, n, 0]
            assert timestep.obs[t, n, 0] == obs[t, n, 0] - 1  # the final one too, before any reset
            ended = obs[t, n, 0] == 1
            assert timestep.terminated[t, n] == episode.ended[t, n] == ended
            if ended:
                assert (episode.score[t, n], episode.length[t, n]) == (score, length)
                score = length = 0
            if t < 39:
                assert (obs[t + 1, n, 0] >= 2) if ended else (obs[t + 1, n, 0] == obs[t, n, 0] - 1)
    assert not timestep.truncated.any()


def test_clock_cuts_episodes_across_rollouts():
    env = Vectorized(Countdown(limit=7, highest=100), 2)
    _, timestep, episode = play(env, steps=5, rollouts=6)
    truncated = np.flatnonzero(timestep.truncated[:, 0] | timestep.terminated[:, 0])
    np.testing.assert_array_equal(episode.length[episode.ended] <= 7, True)
    assert timestep.truncated.sum() >= 6
    assert (np.diff(truncated) <= 7).all()


def test_termination_and_limit_may_coincide():
    env = Vectorized(Countdown(limit=2, highest=3), 1)  # always starts at 2
    _, timestep, _ = play(env, steps=4)
    np.testing.assert_array_equal(timestep.terminated[:, 0], [False, True, False, True])
    np.testing.assert_array_equal(timestep.truncated[:, 0], [False, True, False, True])


class Impatient(Countdown):
    """Says that the episode is cut at 3, and at 0, where it is over."""

    def step(self, key, state, action):
        state, step = super().step(key, state, action)
        return state, step.replace(truncated=(state == 3) | (state == 0))


def test_a_truncation_without_room_for_its_observation_is_an_end_and_not_valid():
    env = Vectorized(Impatient(limit=6, highest=8), 40)
    obs, timestep, episode = play(env, steps=40)
    early, over = obs[..., 0] == 4, obs[..., 0] == 1
    assert early.any()
    assert over.any()
    assert not timestep.truncated.any()
    np.testing.assert_array_equal(timestep.valid, ~early)
    np.testing.assert_array_equal(timestep.terminated, early | over)
    np.testing.assert_array_equal(episode.ended, early | over)
    env.env.may_truncate = True
    _, declared, _ = play(Vectorized(env.env, 40), steps=40)
    assert declared.valid.all()
    np.testing.assert_array_equal(declared.truncated, early | over)


def starts_of(pool_size, steps=600, num_envs=40):
    obs, _, episode = play(Vectorized(Countdown(), num_envs, pool_size), steps)
    return obs[1:, :, 0][episode.ended[:-1]]


def test_pool_starts_have_the_distribution_of_fresh_ones():
    counts = [
        np.bincount(starts_of(pool_size).astype(int), minlength=6)[2:] for pool_size in (0, 600)
    ]
    expected = np.sum(counts, 0) / np.sum(counts)
    for count in counts:
        chi2 = np.sum((count - expected * count.sum()) ** 2 / (expected * count.sum()))
        assert chi2 < 16.3  # 99.9% quantile with 3 degrees of freedom


def test_pool_entry_is_that_of_the_step_and_the_environment():
    env = Vectorized(Countdown(highest=1000), 4, pool_size=3)
    state = env.begin_rollout(keys(0, 3, 4), env.reset(keys(1, 4)))
    pool = np.asarray(state.pool.obs[..., 0])
    assert len(set(pool.ravel())) > 6  # starts differ between environments and entries
    for t in range(7):
        ending = state.replace(env=jnp.ones_like(state.env))
        after, _, _ = env.step(jax.random.split(jax.random.key(t), 4), ending, jnp.zeros(4, int))
        np.testing.assert_array_equal(after.obs[:, 0], pool[t % 3])
        state = after


def test_between_rollouts_there_is_no_pool_and_no_episode_begins():
    """The state that is kept is small; an evaluation steps on and counts first episodes only."""
    env = Vectorized(Countdown(highest=1000), 4, pool_size=3)
    state = env.reset(keys(1, 4))
    ended = env.end_rollout(env.begin_rollout(keys(0, 3, 4), state))
    assert state.pool is None
    assert ended.pool is None
    last = state.replace(env=jnp.ones_like(state.env))
    after, _, episode = env.step(jax.random.split(jax.random.key(0), 4), last, jnp.zeros(4, int))
    assert np.all(episode.ended)
    np.testing.assert_array_equal(after.obs[:, 0], 0)


def test_a_new_pool_is_drawn_for_every_rollout():
    env = Vectorized(Countdown(highest=1000), 4, pool_size=3)
    state = env.reset(keys(1, 4))
    pools = [env.begin_rollout(keys(i, 3, 4), state).pool.obs for i in range(2)]
    assert (np.asarray(pools[0]) != np.asarray(pools[1])).mean() > 0.9


@pytest.mark.parametrize("pool_size", [8, 0])
def test_state_keeps_its_types(pool_size):
    """A state that changes its types, weak ones included, would compile everything twice."""
    env = Vectorized(Countdown(limit=3), 2, pool_size)
    state = jax.eval_shape(env.reset, keys(0, 2))
    begun = jax.eval_shape(env.begin_rollout, keys(1, pool_size, 2), state)
    stepped = jax.eval_shape(env.step, keys(2, 2), begun, jnp.zeros(2, jnp.int32))[0]
    stepped = jax.eval_shape(env.end_rollout, stepped)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(stepped), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (
            after.shape, after.dtype, after.weak_type,
        )  # fmt: skip


class Rounded(Countdown):
    """Begins with a whole number, and goes on with others."""

    def reset(self, key):
        return jnp.zeros((), jnp.int32), jnp.zeros(1)

    def step(self, key, state, action):
        return state + 0.3, TimeStep(
            state[None] + 0.3, state, jnp.zeros((), bool), jnp.zeros((), bool)
        )


def test_what_would_be_rounded_is_refused():
    env = Vectorized(Rounded(limit=3), 2)
    with pytest.raises(ConfigError, match=r"begins with int32\[\] where a step gives float32"):
        play(env, 4)


@pytest.mark.parametrize(("begun", "given"), [("uint8", "int32"), ("bool", "int32")])
def test_what_would_lose_digits_is_refused(begun, given):
    class Counter(Countdown):
        def reset(self, key):
            return jnp.zeros((), begun), jnp.zeros(1)

        def step(self, key, state, action):
            return state + jnp.ones((), given), super().step(key, jnp.zeros(()), action)[1]

    with pytest.raises(ConfigError, match=rf"begins with {begun}\[\] where a step gives {given}"):
        play(Vectorized(Counter(limit=3), 2), 4)


@pytest.mark.parametrize("first", [lambda key: 0, jax.random.uniform])
def test_state_that_is_kept_on_the_object_is_refused(first):
    class Forgetful(Countdown):
        def reset(self, key):
            self.place = first(key)
            return super().reset(key)

        @functools.cached_property
        def size(self):
            return 5

        def step(self, key, state, action):
            assert self.size == 5
            return super().step(key, state, action)

    with pytest.raises(ConfigError, match=r"Forgetful: its reset or step changes self\.place"):
        envs.checks.check_environment("Forgetful", Forgetful())
    envs.checks.check_environment("Countdown", Countdown())


def test_bounds_the_wrong_way_round_are_refused():
    env = Countdown()
    for space in (Box(1.0, -1.0, (1,)), Box(np.nan, 1.0, (1,))):
        env.observation_space = space
        with pytest.raises(ConfigError, match="with a lower bound above the upper"):
            envs.checks.check_environment("Countdown", env)
    with pytest.raises(ValueError, match=r"Box: high has 1 numbers for the shape \[2\]"):
        Box(0.0, (1.0,), (2,))


class Unseen(Countdown):
    """Every other episode begins with what is not a number."""

    def reset(self, key):
        start, obs = super().reset(key)
        return start, jnp.where(start % 2 == 0, jnp.nan, obs)


@pytest.mark.parametrize("pool_size", [8, 0])
def test_a_first_observation_that_is_not_finite_is_zeros(pool_size):
    obs, timestep, episode = play(Vectorized(Unseen(), 4, pool_size), 60)
    assert np.isfinite(obs).all()
    first = obs[1:][episode.ended[:-1]]
    assert {0.0, 3.0, 5.0} == set(first.ravel())
    assert timestep.valid.all()


@pytest.mark.parametrize(("said", "given"), [("float32", jnp.uint8), ("uint8", jnp.float32)])
def test_images_are_bytes_where_their_space_says_so_and_only_there(said, given):
    class Camera(Countdown):
        observation_space = Box(0.0, 255.0, (4, 4, 3), said)

        def reset(self, key):
            return jnp.zeros(()), jnp.zeros((4, 4, 3), given)

    with pytest.raises(ConfigError, match=r"bytes are declared as uint8, and nothing else"):
        Vectorized(Camera(), 2).reset(keys(0, 2))


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="unknown environment 'CartPole-v2'; did you mean CartP"):
        envs.make("CartPole-v2")


class Duck:
    """Almost in Gymnax's style."""

    step_env = reset_env = observation_space = action_space = None


class ForeignSpaces(Countdown):
    action_space = gymnax_spaces.Discrete(2)


def unlimited():
    return Countdown(limit="never")


class TooSmall(Countdown):
    """Begins with observations of another shape."""

    observation_space = Box(0.0, 9.0, (2,))


def test_a_first_observation_of_another_shape_fails_by_name():
    with pytest.raises(AssertionError, match="obs of reset"):
        play(Vectorized(TooSmall(), 2), 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Env", "No module named 'no_such_module'"),
        ("purejaxppo.envs:Nothing", "purejaxppo.envs has no 'Nothing'"),
        ("purejaxppo.spaces:Discrete", r"missing a required argument: 'n'"),
        ("collections:Counter", "it has no observation_space"),
        ("test_envs:Duck", "it has no is_truncated"),
        ("test_envs:ForeignSpaces", "its action_space is Discrete.*, none of purejaxppo.spaces"),
        ("test_envs:unlimited", "its max_episode_steps is 'never': must be a whole number"),
    ],
)
def test_own_environment_that_cannot_be_used(name, message):
    with pytest.raises(ConfigError, match=message):
        envs.make(name)


NO = jnp.zeros((), bool)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("reset", lambda _: jnp.zeros(1), r"reset gives a \S+: must be \(state, obs\)"),
        ("reset", lambda _: (1, jnp.zeros(1), {}), r"reset gives a tuple of 3: must be"),
        ("reset", lambda _: (1, jnp.zeros(2)), r"reset's obs has the shape \[2\]: must be \[1\]"),
        ("reset", lambda _: (1, {"pixels": 0}), r"reset's obs is a dict: must be one array"),
        ("step", lambda *_: (1, jnp.zeros(1), 0.0, NO, {}), "step gives a tuple of 5: must be"),
        (
            "step",
            lambda *_: (1, jnp.zeros(1)),
            r"step gives \(state, \S+\): must be \(state, TimeS",
        ),
        ("step", lambda *_: (1, TimeStep(jnp.zeros(2), 0.0, NO, NO)), r"step's obs has the shape"),
        (
            "step",
            lambda *_: (1, TimeStep(jnp.zeros(1), jnp.ones(1), NO, NO)),
            r"step's reward .*\[1\]",
        ),
        (
            "step",
            lambda *_: ((1, 2), TimeStep(jnp.zeros(1), 0.0, NO, NO)),
            "step gives another state than its",
        ),
    ],
)
def test_own_environment_that_gives_something_else(method, given, message):
    """In one line, before anything is compiled, that names it."""
    mistaken = type("Mistaken", (Countdown,), {method: staticmethod(given)})
    envs.register("Mistaken", mistaken)
    with pytest.raises(ConfigError, match=f"^Mistaken: its {message}"):
        envs.make("Mistaken")


def test_a_mistake_within_a_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "mistaken_environment.py").write_text("import math\nmath.sine\nclass MyEnv: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="'math' has no attribute 'sine'"):
        envs.make("mistaken_environment:MyEnv")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("DeepSea-bsuite", {"siz": 4}, "has no argument 'siz'; did you mean size"),
        ("CartPole-v1", {"colour": 1}, "CartPole-v1 has no argument 'colour'.*it has force_mag"),
        ("MetaMaze-misc", {"maze_size": 4}, "--env-args of MetaMaze-misc: refused by AssertionErr"),
        (
            "MemoryChain-bsuite",
            {"num_bits": 0},
            "--env-args of MemoryChain-bsuite: .*out of bounds",
        ),
        ("Catch-bsuite", {"rows": 2.5}, "--env-args of Catch-bsuite: "),
        ("UmbrellaChain-bsuite", {"n_distractor": "a"}, "--env-args of UmbrellaChain-bsuite: "),
        ("CartPole-v1", {"gravity": True}, "--env-args gravity=True: must be a number"),
        ("CartPole-v1", {"tau": "abc"}, "--env-args tau=abc: must be a number"),
        ("CartPole-v1", {"max_steps_in_episode": 0}, "max_episode_steps is 0: must be a whole"),
        ("CartPole-v1", {"max_steps_in_episode": 2.5}, "max_episode_steps is 2.5: must be a whole"),
        ("CartPole-v1", {"max_steps_in_episode": 2**31}, "must be a whole number in 1 ... 2"),
        ("scripts.custom_environment:Corridor", {"lenght": 4}, "unexpected keyword .*'lenght'"),
    ],
)
def test_arguments_that_do_not_exist(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        envs.make(name, arguments)


def test_arguments_reach_constructor_and_parameters():
    assert envs.make("DeepSea-bsuite", {"size": 5}).observation_space.shape == (5, 5)
    assert envs.make("CartPole-v1", {"max_steps_in_episode": 9}).max_episode_steps == 9
    env = envs.make("scripts.custom_environment:Corridor", {"length": 4})
    assert env.length == 4


def test_register_takes_a_name_once():
    envs.register("Countdown-test", Countdown)
    assert "Countdown-test" in envs.list_environments()
    assert envs.make("Countdown-test", {"limit": 4}).max_episode_steps == 4
    with pytest.raises(ValueError, match="already registered"):
        envs.register("Countdown-test", Countdown)


def test_gymnax_style_environment_of_the_users():
    from gymnax.environments.classic_control import CartPole
    from gymnax.wrappers import StickyActionWrapper

    env = envs.custom.make("mine", CartPole, {"max_steps_in_episode": 20})
    assert (env.max_episode_steps, env.may_truncate) == (20, False)

    class Impatient(CartPole):
        def is_truncated(self, state, params):
            return jnp.abs(state.x) > 0.1

    env = envs.custom.make("mine", Impatient, {})
    assert env.may_truncate

    @dataclasses.dataclass(frozen=True)
    class Params:
        goal: float = 1.0

    class Endless:
        default_params = Params()
        observation_space = action_space = lambda *_: gymnax_spaces.Discrete(2)
        reset_env = step_env = lambda *_: None
        is_truncated = lambda *_: False  # noqa: E731

    class Shaped(CartPole):
        def step(self, key, state, action, params=None):
            return super().step(key, state, action, params)

    for wrapped in (Shaped(), StickyActionWrapper(CartPole())):
        with pytest.raises(ConfigError, match="would be left out: do it in step_env"):
            envs.gymnax.GymnaxEnvironment(wrapped)

    with pytest.raises(ConfigError, match="default_params are None: must be a dataclass"):
        envs.gymnax.build("mine", type("Bare", (Endless,), {"default_params": None}), {})
    assert envs.gymnax.GymnaxEnvironment(Endless()).max_episode_steps is None


def test_gymnax_style_bounds_however_they_are_made():
    """Also where they cannot be traced, or are kept by the environment."""
    from gymnax.environments.classic_control import CartPole

    class OnTheHost(CartPole):
        def observation_space(self, params):
            space = super().observation_space(params)
            return gymnax_spaces.Box(np.asarray(space.low), float(space.high[0]), (4,))

    class Kept(CartPole):
        observation_space = functools.cache(CartPole.observation_space)

    of_cartpole = envs.make("CartPole-v1").observation_space
    found = envs.custom.make("mine", OnTheHost, {}).observation_space
    assert (found.low, found.high) == (of_cartpole.low, of_cartpole.high[0])
    env = Kept()
    for _ in range(2):
        made = envs.gymnax.GymnaxEnvironment(env)
        assert made.observation_space == of_cartpole
    assert np.isfinite(env.observation_space(env.default_params).low).all()


def test_gymnax_style_environment_without_a_clock():
    """Of which Gymnax's own `is_truncated` reads the time."""
    from gymnax.environments.classic_control import CartPole

    @dataclasses.dataclass(frozen=True)
    class Params:
        max_steps_in_episode: int = 3

    class Timeless(CartPole):
        default_params = Params()

        def observation_space(self, params):
            return gymnax_spaces.Box(-1.0, 1.0, (4,))

        def reset_env(self, key, params):
            return jnp.zeros(4), jnp.zeros(4)

        def step_env(self, key, state, action, params):
            return state, state, 1.0, False, {}

    env = Vectorized(envs.custom.make("mine", Timeless, {}), num_envs=1)
    key, action = jax.random.split(jax.random.key(0), 1), jnp.zeros(1, jnp.int32)
    state, lengths = env.reset(key), []
    for _ in range(3):
        state, timestep, episode = env.step(key, state, action)
        lengths += episode.length[timestep.truncated].tolist()
    assert lengths == [3]


def test_gymnax_style_environment_that_gives_something_else():
    from gymnax.environments.classic_control import CartPole

    class Swapped(CartPole):
        def reset_env(self, key, params):
            return super().reset_env(key, params)[::-1]

    class Truncating(CartPole):
        def step_env(self, key, state, action, params):
            return (*super().step_env(key, state, action, params), False)

    told = r"Swapped: its reset_env gives EnvState first: must be \(obs, state\)"
    with pytest.raises(ConfigError, match=told):
        envs.custom.make("mine", Swapped, {})
    told = r"its step_env gives a tuple of 6: must be \(obs, state, reward, done, info\)"
    with pytest.raises(ConfigError, match=told):
        envs.custom.make("mine", Truncating, {})


def test_environment_that_downloads_says_so_in_one_line():
    with pytest.raises(ConfigError, match="MNISTBandit-bsuite downloads its data, and that failed"):
        envs.make("MNISTBandit-bsuite")
