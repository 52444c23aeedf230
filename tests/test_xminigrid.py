"""MiniGrid's tasks on the device: what is seen, when they end, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import envs
from purejaxppo.render import find_sketch
from purejaxppo.values import ConfigError

xminigrid = pytest.importorskip("xminigrid")

DOOR = "xminigrid/MiniGrid-DoorKey-5x5"
FORWARD, TURN = jnp.int32(0), jnp.int32(1)


def test_a_cell_is_its_tile_and_its_colour():
    env = envs.make(DOOR)
    state, obs = env.reset(jax.random.key(0))
    assert env.observation_space.shape == obs.shape == (7, 7, 13 + 12)
    assert obs.dtype == bool
    np.testing.assert_array_equal(jnp.argmax(obs[..., :13], -1), state.observation[..., 0])
    np.testing.assert_array_equal(jnp.argmax(obs[..., 13:], -1), state.observation[..., 1])
    np.testing.assert_array_equal(obs.sum(-1), 2)


def test_reaching_the_goal_ends_an_episode_and_running_out_of_time_does_not():
    env = envs.make("xminigrid/MiniGrid-Empty-5x5", {"max_steps": 6})
    step = jax.jit(env.step)
    state, _ = env.reset(jax.random.key(0))
    last = None
    for action in (FORWARD, FORWARD, TURN, FORWARD, FORWARD):
        assert last is None or not last.terminated
        state, last = step(jax.random.key(0), state, action)
    assert last.terminated
    assert last.reward == pytest.approx(1 - 0.9 * 5 / 6)
    state, _ = env.reset(jax.random.key(0))
    for _ in range(6):
        state, last = step(jax.random.key(0), state, TURN)
    assert state.last()  # the package's own limit, which the trainer's clock keeps
    assert not last.terminated
    assert env.max_episode_steps == 6


def test_arguments_and_names():
    assert envs.make(DOOR, {"view_size": 5}).observation_space.shape == (5, 5, 25)
    with pytest.raises(ConfigError, match="has no argument 'max_step'; did you mean max_steps"):
        envs.make(DOOR, {"max_step": 2})
    for wrong in ({"height": 0}, {"width": 7.5}, {"max_steps": "x"}):
        with pytest.raises(ConfigError, match="--env-args"):
            envs.make(DOOR, wrong)
    assert envs.full_name("MiniGrid-FourRooms") == "xminigrid/MiniGrid-FourRooms"


def test_every_task_is_listed_and_can_be_made():
    listed = [name for name in envs.list_environments() if name.startswith("xminigrid/")]
    own = [name for name in xminigrid.registered_environments() if name.startswith("MiniGrid")]
    assert {f"xminigrid/{name}" for name in own} == set(listed)
    for name in listed:
        assert envs.make(name).max_episode_steps > 0


def test_grids_draw_themselves():
    env = envs.make(DOOR)
    state, _ = env.reset(jax.random.key(0))
    assert find_sketch(env, DOOR).draw(state).size[0] >= 100
