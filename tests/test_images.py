"""Images as they were asked for: grey, resized, stacked, and never of two episodes."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Probe, Unusual
from test_envs import play

from purejaxppo import envs
from purejaxppo.config import Config, Hyper
from purejaxppo.envs.images import Images
from purejaxppo.spaces import Box
from purejaxppo.train import make_train
from purejaxppo.types import TimeStep
from purejaxppo.values import ConfigError


@dataclass(frozen=True)
class Film(Probe):
    """Frames in one colour, whose red counts the steps and whose green is the episode's own number.

    Episodes of odd numbers last three steps, the others five.
    """

    observation_space: ClassVar[Box] = Box(0, 255, (4, 6, 3), "uint8")

    def frame(self, state):
        colour = jnp.stack([state[1], state[0], jnp.array(200)]).astype(jnp.uint8)
        return jnp.broadcast_to(colour, (4, 6, 3))

    def reset(self, key):
        state = jnp.stack([jax.random.randint(key, (), 1, 250), jnp.array(1)])
        return state, self.frame(state)

    def step(self, key, state, action):
        state = state.at[1].add(1)
        ended = state[1] > jnp.where(state[0] % 2, 3, 5)
        truncated = ended & (state[0] % 3 == 0)
        return state, TimeStep(self.frame(state), jnp.ones(()), ended & ~truncated, truncated)


FILM = Film(may_truncate=True)


def vector(**options):
    return envs.vectorize(Config(num_envs=3, pool_size=4, **options), FILM)


def test_a_stack_never_mixes_two_episodes():
    obs, timestep, episode = play(vector(frame_stack=4), steps=30)
    assert obs.shape == (30, 3, 4, 6, 12)
    assert obs.dtype == np.uint8
    expected = np.zeros((3, 4), int)
    for t in range(30):
        for n in range(3):
            count, number, blue = obs[t, n, 0, 0].reshape(4, 3).T  # of the four frames
            if t == 0 or episode.ended[t - 1, n]:
                expected[n] = 1  # the first frame, four times
            np.testing.assert_array_equal(count, expected[n])
            np.testing.assert_array_equal(number, number[0])
            np.testing.assert_array_equal(blue, 200)
            # What the step leads to is of the same episode, at its end as well.
            expected[n] = [*expected[n][1:], expected[n][-1] + 1]
            count, follows, _ = timestep.obs[t, n, 0, 0].reshape(4, 3).T
            np.testing.assert_array_equal(count, expected[n])
            np.testing.assert_array_equal(follows, number)
    assert {3, 5} == set(episode.length[episode.ended])
    assert timestep.truncated.any()
    assert timestep.terminated.any()
    assert len(set(obs[..., 0, 0, 1].ravel())) > 10


def test_grey_is_the_luma_and_bytes_stay_bytes():
    env = vector(grayscale=True)
    assert env.observation_space == Box(0.0, 255.0, (4, 6, 1), "uint8")
    colour = play(vector(), steps=6)[0]
    grey = play(env, steps=6)[0]
    np.testing.assert_array_equal(grey, np.rint(colour @ [0.299, 0.587, 0.114])[..., None])
    assert grey.dtype == np.uint8


def test_resizing_keeps_what_is_in_the_image():
    @dataclass(frozen=True)
    class Halves(Film):
        """Black above, white below."""

        def frame(self, state):
            return jnp.full((4, 6, 3), 255, jnp.uint8).at[:2].set(0)

    config = Config(num_envs=2, resize=(8, 3), grayscale=True, frame_stack=2)
    env = envs.vectorize(config, Halves(may_truncate=True))
    assert env.observation_space.shape == (8, 3, 2)
    obs = play(env, steps=2)[0]
    assert obs.shape == (2, 2, 8, 3, 2)
    np.testing.assert_array_equal(obs[:, :, :3], 0)
    np.testing.assert_array_equal(obs[:, :, 5:], 255)


def test_booleans_stay_booleans_in_a_stack_and_become_grey_by_resizing():
    @dataclass(frozen=True)
    class Bits(Film):
        """White below the topmost of four rows."""

        observation_space: ClassVar[Box] = Box(0, 1, (4, 6, 3))

        def frame(self, state):
            return jnp.ones((4, 6, 3), bool).at[:1].set(False)

    bits = Bits(may_truncate=True)
    stacked = play(envs.vectorize(Config(num_envs=2, frame_stack=2), bits), steps=2)[0]
    assert stacked.dtype == bool
    assert not stacked[..., 0, :, :].any()
    assert stacked[..., 1:, :, :].all()
    halved = play(envs.vectorize(Config(num_envs=2, resize=(2, 6)), bits), steps=2)[0]
    assert halved.dtype == np.float32
    assert (halved[..., 0, :, :] > 0).all()
    assert (halved[..., 0, :, :] < 1).all()


def test_nothing_is_added_where_nothing_is_asked_for():
    assert not isinstance(vector(), Images)
    assert hash(vector(frame_stack=2)) == hash(vector(frame_stack=2))
    assert vector(frame_stack=2) == vector(frame_stack=2) != vector(frame_stack=3)


@pytest.mark.parametrize(
    ("options", "space", "message"),
    [
        ({"frame_stack": 4}, Box(-1.0, 1.0, (4,)), "--frame-stack: .* not images .H, W, C."),
        ({"resize": (8, 8)}, Box(-1.0, 1.0, (4, 4)), "--resize: .* not images"),
        ({"grayscale": True}, Box(0, 255, (8, 8, 4), "uint8"), "not images .H, W, 3."),
    ],
)
def test_what_is_no_image_is_refused(options, space, message):
    @dataclass(frozen=True)
    class Other(Probe):
        observation_space: ClassVar[Box] = space

    with pytest.raises(ConfigError, match=message):
        envs.vectorize(Config(env="Thing-v0", **options), Other())


def test_frames_are_what_an_evaluation_sees_too():
    config = dataclasses.replace(Config(), frame_stack=3)
    assert envs.vectorize(config, FILM, 5).observation_space.shape == (4, 6, 9)
    assert envs.vectorize(config, FILM, 5).num_envs == 5


def test_a_first_image_that_is_not_finite_does_not_spoil_the_training():
    config = Config(
        total_timesteps=32, num_envs=2, num_steps=8, num_minibatches=2, cnn_layers=(), torso_layers=(8,), frame_stack=3
    )  # fmt: skip
    train = jax.jit(make_train(config, Unusual(shape=(2, 2, 1))))
    state, metrics = train(jax.random.key(0), Hyper())
    assert np.isfinite(metrics.policy_loss).all()
    assert np.isfinite(state.env_state.obs).all()
    assert np.all(metrics.invalid_steps == 0)
