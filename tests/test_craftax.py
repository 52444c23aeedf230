"""Craftax's worlds: what is seen, when they end, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import envs
from purejaxppo.render import find_sketch
from purejaxppo.values import ConfigError

craftax_env = pytest.importorskip("craftax.craftax_env")

CLASSIC = "Craftax-Classic-Symbolic-v1"
WAIT = jnp.int32(0)


def test_worlds_and_steps_are_craftaxs_own():
    ours = envs.make(f"craftax/{CLASSIC}")
    theirs = craftax_env.make_craftax_env_from_name(CLASSIC, auto_reset=False)
    begin, act = jax.random.split(jax.random.key(3))
    state, obs = jax.jit(ours.reset)(begin)
    own_obs, own_state = theirs.reset(begin)
    np.testing.assert_array_equal(obs, own_obs)
    action = jnp.int32(5)  # DO
    state, step = jax.jit(ours.step)(act, state, action)
    own_obs, own_state, reward, done, _ = theirs.step(act, own_state, action)
    np.testing.assert_array_equal(step.obs, own_obs)
    assert (step.reward, step.terminated) == (reward, done)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, own_state))


def test_running_out_of_time_is_no_death():
    """Craftax's own flag has both."""
    ours = envs.make(f"craftax/{CLASSIC}", {"max_timesteps": 2})
    theirs = craftax_env.make_craftax_env_from_name(CLASSIC, auto_reset=False)
    params = theirs.default_params.replace(max_timesteps=2)
    state, _ = jax.jit(ours.reset)(jax.random.key(0))
    late = state.replace(timestep=state.timestep + 1)
    _, step = jax.jit(ours.step)(jax.random.key(1), late, WAIT)
    *_, done, _ = theirs.step(jax.random.key(1), late, WAIT, params)
    assert done
    assert not step.terminated
    assert ours.max_episode_steps == 2
    dying = state.replace(player_health=state.player_health * 0)
    assert jax.jit(ours.step)(jax.random.key(1), dying, WAIT)[1].terminated


def test_arguments_and_names():
    env = envs.make(f"craftax/{CLASSIC}", {"map_size": [32, 32], "max_cows": 1})
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    assert state.map.shape == (32, 32)
    assert state.cows.mask.shape == (1,)
    with pytest.raises(ConfigError, match="has no argument 'map_sise'; did you mean map_size"):
        envs.make(f"craftax/{CLASSIC}", {"map_sise": 2})
    with pytest.raises(ConfigError, match="day_length=x: must be a number"):
        envs.make(f"craftax/{CLASSIC}", {"day_length": "x"})
    for wrong in ({"max_timesteps": 0}, {"map_size": 3}):
        with pytest.raises(ConfigError, match=f"{CLASSIC}: "):
            envs.make(f"craftax/{CLASSIC}", wrong)
    assert envs.full_name("Craftax-Symbolic-v1") == "craftax/Craftax-Symbolic-v1"


@pytest.mark.parametrize(
    "name", [CLASSIC, pytest.param("Craftax-Symbolic-v1", marks=pytest.mark.slow)]
)
def test_worlds_draw_themselves(name):
    env = envs.make(f"craftax/{name}")
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    picture = env.render(state)
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    assert len(np.unique(picture)) > 30
    assert find_sketch(env, name).draw(state).size >= picture.shape[1::-1]
