"""CHIP-8 games: what is seen of them, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import envs
from purejaxppo.render import find_sketch
from purejaxppo.values import ConfigError

octax = pytest.importorskip("octax.environments")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the emulator's own types
def test_frames_are_channels_of_an_upright_image():
    env = envs.make("octax/brix", {"frame_skip": 2})
    own, _ = octax.create_environment("brix", frame_skip=2)
    _, frames, _ = own.reset(jax.random.key(0))
    state, obs = env.reset(jax.random.key(0))
    assert env.observation_space.shape == obs.shape == (32, 64, 2)
    assert obs.dtype == np.uint8
    np.testing.assert_array_equal(obs[..., 1], 255 * np.asarray(frames[1]).T)
    shown = np.asarray(obs[..., 1]) > 0
    np.testing.assert_array_equal(shown.any(axis=1), np.isin(range(32), range(6, 17, 2)))  # bricks
    state, step = jax.jit(env.step)(jax.random.key(1), state, jnp.int32(0))
    assert step.obs.shape == (32, 64, 2)
    assert set(np.unique(step.obs)) == {0, 255}


def test_arguments_and_names():
    assert envs.make("octax/pong", {"max_num_steps_per_episodes": 7}).max_episode_steps == 7
    with pytest.raises(ConfigError, match="has no argument 'frame_skips'; did you mean frame_skip"):
        envs.make("octax/pong", {"frame_skips": 2})
    for wrong in ({"fps": 0}, {"fps": 1000}, {"frame_skip": 2.5}, {"instruction_frequency": "x"}):
        with pytest.raises(ConfigError, match="--env-args "):
            envs.make("octax/pong", wrong)
    with pytest.raises(
        ConfigError, match="unknown environment 'octax/brixx'; did you mean octax/brix"
    ):
        envs.make("octax/brixx")


def test_every_listed_game_is_there():
    listed = [name for name in envs.list_environments() if name.startswith("octax/")]
    assert len(listed) == 37
    for name in listed:
        assert envs.make(name).action_space.n >= 2


def test_games_draw_themselves():
    for skip in (4, 8):
        env = envs.make("octax/brix", {"frame_skip": skip})
        assert find_sketch(env, "octax/brix").rate == 60 / skip
