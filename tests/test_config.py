"""Options: YAML, types, ranges, and the configurations that are shipped."""

import dataclasses

import pytest
import yaml

from purejaxppo.config import (
    _ELSEWHERE,
    Config,
    Hyper,
    RunOptions,
    Settings,
    config_directory,
    make_settings,
    our_name,
    shipped_config,
)
from purejaxppo.convolutions import CNN_LAYERS
from purejaxppo.envs import load_settings
from purejaxppo.validation import validate
from purejaxppo.values import (
    ConfigError,
    parse_cnn_layers,
    parse_env_args,
    parse_int,
    parse_layers,
    show_cnn_layers,
    suggest,
)

SHIPPED = sorted(config_directory().rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_is_valid_and_says_only_what_differs(path):
    settings = load_settings(file=path)
    validate(settings)
    values = yaml.safe_load(path.read_text()) or {}
    if path.parent.name == "examples":  # may spell out what an example is about
        return
    defaults = Settings().to_dict()
    loaded = settings.to_dict()
    repeated = [name for name in values if name != "env" and loaded[name] == defaults[name]]
    assert repeated == []


def test_shipped_files_are_found_by_environment():
    brax = config_directory() / "brax"
    assert shipped_config("brax/ant", "generalized") == brax / "ant-generalized.yaml"
    assert shipped_config("brax/ant", "mjx") == shipped_config("brax/ant") == brax / "ant.yaml"
    assert shipped_config("CartPole-v1") == config_directory() / "gymnax" / "CartPole-v1.yaml"
    assert shipped_config("my_module:MyEnv") is None


def test_settings_survive_yaml():
    settings = Settings(
        RunOptions(seed=3, num_seeds=2, run_dir="x"),
        Config(
            env_args=(("size", 4), ("layout", (1, 2))),
            torso_layers=(8,),
            shared_torso=True,
            cnn_layers=((8, 3, 1), (4, 2, 2)),
            resize=(8, 6),
        ),
        Hyper(learning_rate=1e-3, target_kl=0.02),
    )
    text = yaml.safe_dump(settings.to_dict(), sort_keys=False)
    assert make_settings(yaml.safe_load(text)) == settings


def test_yaml_numbers_that_are_read_as_text():
    values = yaml.safe_load("learning_rate: 3e-4\ntotal_timesteps: 1e6\nnum_envs: 1_000")
    settings = make_settings(values)
    assert settings.hyper.learning_rate == 3e-4
    assert settings.config.total_timesteps == 1_000_000
    assert settings.config.num_envs == 1_000


def test_convolutions_by_name_and_by_numbers():
    assert parse_cnn_layers("minatar") == ((16, 3, 1),)
    assert make_settings({"cnn_layers": "flat"}).config.cnn_layers == ()
    assert parse_cnn_layers("32x8x4,64x4x2") == ((32, 8, 4), (64, 4, 2))
    for layers in (*CNN_LAYERS.values(), ((32, 8, 4), (64, 4, 2))):
        assert parse_cnn_layers(show_cnn_layers(layers)) == layers


def test_yaml_off_is_the_choice_and_not_false():
    values = yaml.safe_load("normalize_advantages: off")
    assert make_settings(values).config.normalize_advantages == "off"


def test_names_that_other_libraries_give_options_are_none_of_ours():
    options = Settings().to_dict()
    for name, others in _ELSEWHERE.items():
        assert name in options
        for other in others.split():
            assert our_name(other) == name
            assert other not in options
    assert our_name("gamma") == "gamma"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lerning_rate": 1}, "unknown option 'lerning_rate'; did you mean learning_rate"),
        ({"NUM_EPOCHS": 1}, "unknown option 'NUM_EPOCHS'; did you mean update_epochs"),
        ({"num_envs": 1.5}, "num_envs: 1.5 is not a whole number"),
        ({"num_envs": True}, "num_envs: True is not a whole number"),
        ({"learning_rate": "fast"}, "learning_rate: 'fast' is not a number"),
        ({"shared_torso": "maybe"}, "shared_torso: 'maybe' is not true or false"),
        ({"log_std": "both"}, "log_std: 'both' is not one of parameter, state"),
        ({"torso_layers": 64}, "torso_layers: 64 is not a list of whole numbers"),
        ({"cnn_layers": "big"}, "cnn_layers: 'big' is not one of nature, nips, minatar, flat, or"),
        ({"cnn_layers": [[8, 3]]}, "cnn_layers: .* is not one of nature"),
        ({"resize": [84]}, "resize: .84. is not"),
        ({"env": 3}, "env: 3 is not text"),
    ],
)
def test_wrong_names_and_types(values, message):
    with pytest.raises(ConfigError, match=message):
        make_settings(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_envs": 0}, "--num-envs 0: must be at least 1"),
        ({"total_timesteps": 0}, "--total-timesteps 0: must be at least 1"),
        ({"num_envs": 3, "num_steps": 5}, "3 .* 5 = 15 is not divisible by --num-minibatches 4"),
        ({"gamma": 1.5}, "--gamma 1.5: must be in 0 ... 1"),
        ({"gae_lambda": -0.1}, "--gae-lambda -0.1: must be in 0 ... 1"),
        ({"learning_rate": 0}, "--learning-rate 0.0: must be above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate nan: must be above 0"),
        ({"critic_learning_rate": -1}, "--critic-learning-rate -1.0: must be above 0"),
        ({"clip_eps": 0}, "--clip-eps 0.0: must be above 0"),
        ({"value_clip_eps": 0}, "--value-clip-eps"),
        ({"ent_coef": -1}, "--ent-coef -1.0: must be at least 0"),
        ({"vf_coef": float("inf")}, "--vf-coef inf"),
        ({"target_kl": 0}, "--target-kl"),
        ({"desired_kl": 0.01}, "both set the learning rate: add --no-anneal-learning-rate"),
        ({"activation": "sin"}, "--activation sin: must be one of tanh, relu"),
        ({"torso_layers": [64, 0]}, "--torso-layers"),
        ({"cnn_layers": [[8, 3, 0]]}, "--cnn-layers .8, 3, 0.*: must be features, kernel"),
        ({"frame_stack": 0}, "--frame-stack 0"),
        ({"resize": [0, 4]}, "--resize .0, 4.: must be sizes"),
        ({"reward_clip": 0}, "--reward-clip 0.0"),
        ({"microbatch_size": 0}, "--microbatch-size 0"),
        ({"pool_size": 0}, "--pool-size 0"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
        ({"num_seeds": 0}, "--num-seeds 0: must be in 1"),
        ({"seed": 2**32}, "--seed 4294967296: must be at most"),
        ({"eval_every": -5}, "--eval-every -5"),
        ({"metrics_rows": -1}, "--metrics-rows -1"),
        ({"runs_per_block": 0}, "--runs-per-block 0"),
    ],
)
def test_values_out_of_range(values, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_settings(values))


def test_every_number_has_a_range():
    """An option added later needs a check: nan or -1 passes for none of the present ones."""
    for cls in (Config, RunOptions, Hyper):
        for field in dataclasses.fields(cls):
            if "int" in str(field.type) or "float" in str(field.type):
                value = float("nan") if "float" in str(field.type) else -1
                value = [value] if "tuple" in str(field.type) else value
                with pytest.raises(ConfigError, match=field.name.replace("_", "-")):
                    validate(make_settings({field.name: value}))


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.yaml: No such file"):
        load_settings(file=tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match=r"broken.yaml: not YAML"):
        load_settings(file=broken)
    broken.write_text("seed: 2024-13-01")
    with pytest.raises(ConfigError, match=r"broken.yaml: not YAML: month must be"):
        load_settings(file=broken)
    broken.write_text("gamma: 0.9\nseed: 1\ngamma: 0.99")
    with pytest.raises(ConfigError, match=r"broken.yaml: not YAML: gamma is there again in line 3"):
        load_settings(file=broken)
    broken.write_text("env_args: {start: 2024-12-01}")
    with pytest.raises(
        ConfigError, match=r"broken.yaml: env_args: .* is not name: value, each a num"
    ):
        load_settings(file=broken)
    broken.write_text("just text")
    with pytest.raises(ConfigError, match="not a mapping"):
        load_settings(file=broken)
    broken.write_text("lerning_rate: 1")
    with pytest.raises(ConfigError, match=r"broken.yaml: unknown option"):
        load_settings(file=broken)


def test_environment_given_with_a_file_wins(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("env: Acrobot-v1\nnum_envs: 2")
    settings = load_settings("Pendulum-v1", file)
    assert (settings.config.env, settings.config.num_envs) == ("Pendulum-v1", 2)


def test_settings_by_a_short_name_and_not_by_a_wrong_one(tmp_path):
    assert load_settings("hopper") == load_settings("brax/hopper") != load_settings("brax/ant")
    assert load_settings("hopper").config.env == "brax/hopper"
    file = tmp_path / "some.yaml"
    file.write_text("env: hopper")
    assert load_settings(file=file).config.env == "brax/hopper"
    assert load_settings("my_module:MyEnv").config.env == "my_module:MyEnv"
    with pytest.raises(ConfigError, match=r"unknown environment 'Cartpole-v1'; did you mean Cart"):
        load_settings("Cartpole-v1")


def test_parsers():
    assert [parse_int(text) for text in ("1e6", "1_000_000", "7")] == [1_000_000, 1_000_000, 7]
    for text in ("1.5", "1e-1", "x"):
        with pytest.raises(ValueError, match=r"whole|could not convert"):
            parse_int(text)
    assert parse_layers("64,64") == (64, 64)
    assert parse_layers("") == ()
    assert parse_env_args(["size=8", "flag=true", "xs=[1, 2]"]) == (
        ("size", 8), ("flag", True), ("xs", (1, 2)),
    )  # fmt: skip
    # YAML 1.1 reads these as texts.
    assert parse_env_args(["steps=1e3", "rate=2e-3"]) == (("steps", 1000), ("rate", 0.002))
    with pytest.raises(ValueError, match="'size' is not name=value"):
        parse_env_args(["size"])


def test_suggestions_ignore_case():
    assert suggest("cartpole-v1", ["CartPole-v1", "Pong-misc"]) == "; did you mean CartPole-v1?"
    assert suggest("zzz", ["CartPole-v1"]) == ""


def test_iterations_are_rounded_up():
    config = Config(total_timesteps=1001, num_envs=4, num_steps=25)
    assert (config.batch_size, config.iterations) == (100, 11)


def test_shipped_settings_are_used_for_their_backend_only():
    published = load_settings("brax/ant").config
    assert (published.backend, published.num_envs, published.pool_size) == ("positional", 4096, 1)
    other = load_settings("brax/ant", backend="generalized").config
    assert (other.backend, other.num_envs) == ("generalized", 64)
    # None are known for this one: what all of Brax starts from.
    unknown = load_settings("brax/ant", backend="mjx").config
    assert (unknown.backend, unknown.num_envs) == ("mjx", Config.num_envs)
    assert unknown.normalize_observations
