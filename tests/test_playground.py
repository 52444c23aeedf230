"""MuJoCo Playground, where it is installed."""

import importlib.util

import pytest

from purejaxppo import envs
from purejaxppo.values import ConfigError

installed = importlib.util.find_spec("mujoco_playground") is not None


@pytest.mark.skipif(not installed, reason="the extra playground is not installed")
def test_arguments_are_those_of_its_configuration():
    env = envs.make("CartpoleBalance", {"episode_length": 100, "action_repeat": 2})
    assert env.max_episode_steps == 50
    assert env.observation_space.shape == (5,)
    assert env.action_space.shape == (1,)
    with pytest.raises(ConfigError, match="did you mean ctrl_dt"):
        envs.make("playground/CartpoleBalance", {"ctrl_d": 1})
    with pytest.raises(ConfigError, match="did you mean CheetahRun"):
        envs.make("playground/CheetahRunn")


@pytest.mark.skipif(not installed, reason="the extra playground is not installed")
def test_assets_that_cannot_be_downloaded_are_refused_in_words(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no git, as good as no network
    from mujoco_playground._src import mjx_env

    if mjx_env.MENAGERIE_PATH.exists():
        pytest.skip("the assets are there")
    with pytest.raises(ConfigError, match="downloads its assets, and that failed"):
        envs.make("playground/Go1JoystickFlatTerrain")
