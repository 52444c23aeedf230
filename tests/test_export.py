"""Exported policies act as the trainer's own, in every format and for every head."""

import errno
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import cli, numpy_policy
from purejaxppo.activations import ACTIVATIONS
from purejaxppo.agent import is_bytes, make_agent
from purejaxppo.config import Config, Hyper
from purejaxppo.export import export
from purejaxppo.policy import Policy
from purejaxppo.spaces import Box, Discrete
from purejaxppo.spaces import MultiDiscrete as Multi
from purejaxppo.stats import Moments
from purejaxppo.sweep import Run, Setting
from purejaxppo.values import ConfigError

INF = float("inf")
VECTOR = Box(-INF, INF, (4,))
TORQUES = Box((-0.5, -3.0), (2.0, -1.0), (2,))  # no bound the other's negative
HALF_OPEN = Box((-INF, -INF, -1.0), (INF, 0.5, 1.0), (3,))
BYTES = Box(0, 255, (3, 3, 2), "uint8")
TANH = {"action_distribution": "tanh_gaussian", "log_std": "state"}
NORMALISED = {"normalize_observations": True}

CASES = {
    "discrete": (VECTOR, Discrete(3), {}),
    "multi-discrete": (VECTOR, Multi((3, 2, 5)), {}),
    "clipped": (VECTOR, TORQUES, {}),
    "half-open": (VECTOR, HALF_OPEN, {"log_std": "state"}),
    "tanh": (VECTOR, TORQUES, TANH),
    "normalised": (VECTOR, Discrete(3), NORMALISED),
    "normalised tanh": (VECTOR, TORQUES, NORMALISED | TANH),
    "one-hot": (Discrete(7), Discrete(3), {}),
    "one-hot, no hidden layer": (Discrete(7), Multi((4,)), {"torso_layers": ()}),
    "shared": (VECTOR, Discrete(3), {"shared_torso": True, "policy_layers": (16,)}),
    "shared torso alone": (VECTOR, TORQUES, {"shared_torso": True, "value_layers": (16,)}),
    "bytes": (BYTES, Box(-1.0, 1.0, (2, 3)), NORMALISED | TANH),
    "convolutions": (
        Box(0, 255, (9, 8, 2), "uint8"),
        Discrete(3),
        {"cnn_layers": ((8, 3, 2), (6, 2, 1)), "activation": "relu"},
    ),
    "a number": (Box(-INF, INF, ()), Box(-1.0, 1.0, ()), {}),
    "fused": (VECTOR, Discrete(3), {"dense": "fused"}),
    "float64": (Box(-1.0, 1.0, (2,), "float64"), Discrete(2), {}),
} | {name: (VECTOR, TORQUES, {"activation": name}) for name in ACTIVATIONS if name != "tanh"}


def make_policy(observation_space, action_space, options):
    """With parameters and statistics that are any numbers."""
    config = Config(**({"torso_layers": (32, 32)} | options))
    agent = make_agent(config, observation_space, action_space)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(agent.init, jax.random.key(0), Hyper())
    params = jax.tree.map(lambda leaf: np.float32(rng.normal(0, 0.3, leaf.shape)), shapes)
    shape, moments = observation_space.shape, None
    if config.normalize_observations:
        size = 60 if observation_space is BYTES else 3
        mean, std = rng.normal(0.5, 1, shape) * size, rng.uniform(0.3, 1, shape) * size
        moments = Moments(*map(np.float32, (1e4, mean, std**2, 0)))
    swept = {"torso_layers": (32, 32), "max_grad_norm": np.inf}
    run = Run(3, 14, Setting(swept, config, Hyper()))
    return Policy(run, None, agent, params, moments, 159)


def observations(policy, count=10_000):
    """As an environment gives them; some so large that a normaliser clips them."""
    rng, space = np.random.default_rng(1), policy.agent.observation_space
    if isinstance(space, Discrete):
        return rng.integers(0, space.n, count, np.int32)
    if is_bytes(space):
        return rng.integers(0, 256, (count, *space.shape), np.uint8)
    numbers = rng.normal(size=(count, *space.shape)).astype(space.dtype)
    if policy.obs_stats is not None:
        numbers[::10] *= 100
    return numbers


REMEMBERING = {
    "memory": (VECTOR, TORQUES, NORMALISED | {"gru_units": 8, "policy_layers": (16,)}),
    "memory alone": (Discrete(7), Discrete(3), {"gru_units": 8, "torso_layers": ()}),
    "memory of images": (
        Box(0, 255, (5, 4, 2), "uint8"),
        TORQUES,
        {"gru_units": 8, "cnn_layers": ((6, 3, 1),), "torso_layers": ()},
    ),
}


def export_case(case, tmp_path_factory):
    """A policy and the directory it was exported to."""
    policy = make_policy(*case)
    directory = tmp_path_factory.mktemp("export")
    export(policy, directory)
    return policy, directory


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory):
    return export_case(CASES[request.param], tmp_path_factory)


@pytest.fixture(scope="module", params=REMEMBERING)
def remembering(request, tmp_path_factory):
    return export_case(REMEMBERING[request.param], tmp_path_factory)


def check(policy, act):
    """That `act` is the policy, whatever the size of the batch.

    Numbers differ by less than 1e-5 of the largest action, for near zero even the policy's own have no
    more digits than that; choices at most where two are as good as each other.
    """
    obs = observations(policy)
    expected = policy(obs)
    for count in (1, 7, len(obs)):
        wanted, action = expected[:count], np.asarray(act(obs[:count]))
        assert (action.shape, action.dtype) == (wanted.shape, wanted.dtype)
        if isinstance(policy.agent.action_space, Box):
            largest = np.abs(expected).max(axis=0)
            assert np.all(np.abs(action - wanted) < 1e-5 * largest)
        elif not np.array_equal(action, wanted):
            other = (action != wanted).reshape(count, -1).any(1)
            assert other.sum() <= 3
            assert np.all(lead(policy, obs)[:count][other] < 1e-5)
    different = np.unique(expected.reshape(len(obs), -1), axis=0)
    assert len(different) > (len(obs) / 2 if isinstance(policy.agent.action_space, Box) else 1)


def lead(policy, obs):
    """[b] by how much the least certain choice leads the next best."""
    ones = jnp.ones(len(obs), bool)
    logits = policy.agent.apply(policy.params, policy.obs_stats, obs, (), ones).policy.logits
    nvec = getattr(policy.agent.action_space, "nvec", (logits.shape[-1],))
    parts = [np.sort(part) for part in np.split(logits, np.cumsum(nvec)[:-1], axis=-1)]
    return np.min([part[:, -1] - part[:, -2] for part in parts], axis=0)


def load_numpy(directory):
    """`policy.py` as it lies there."""
    spec = importlib.util.spec_from_file_location("exported_policy", directory / "policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Policy(directory / "policy.npz")


def check_memory(policy, step):
    """That `step` is the policy's, in four steps in a row."""
    obs = observations(policy, 4 * 50).reshape(4, 50, *policy.agent.observation_space.shape)
    memory, own = np.zeros((50, 8), np.float32), None
    for now in obs:
        action, memory = step(now, memory)
        expected, own = policy.step(now, own)
        assert (action.shape, action.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(memory, own, rtol=0, atol=1e-5)
        np.testing.assert_allclose(action, expected, rtol=0, atol=1e-5)
    assert np.ptp(own, axis=0).min() > 0.1
    forgetful, _ = policy.step(now)
    assert not np.allclose(forgetful, expected, atol=1e-3)


def test_stablehlo_with_a_memory(remembering):
    policy, directory = remembering
    program = jax.export.deserialize(bytearray((directory / "policy.stablehlo").read_bytes()))
    check_memory(policy, jax.jit(program.call))


def test_onnx_with_a_memory(remembering):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy, directory = remembering
    session = runtime.InferenceSession(directory / "policy.onnx")
    names = ["action", "memory_after"]
    check_memory(policy, lambda obs, memory: session.run(names, {"obs": obs, "memory": memory}))


def test_numpy_with_a_memory(remembering):
    policy, directory = remembering
    alone = load_numpy(directory)
    check_memory(policy, alone.step)
    obs = observations(policy, 6)
    grid = obs.reshape(2, 3, *obs.shape[1:])
    for a, b in zip(alone.step(grid), policy.step(grid), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for each in (alone, policy):
        with pytest.raises(ValueError, match="this policy has a memory"):
            each(obs)
    facts = json.loads((directory / "policy.json").read_text())
    assert facts["memory"] == 8


def test_stablehlo(exported):
    policy, directory = exported
    program = jax.export.deserialize(bytearray((directory / "policy.stablehlo").read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    check(policy, jax.jit(program.call))


def test_onnx(exported):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy, directory = exported
    session = runtime.InferenceSession(directory / "policy.onnx")
    (given,) = session.get_inputs()
    kinds = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(uint8)": np.uint8}
    check(policy, lambda obs: session.run(["action"], {"obs": obs.astype(kinds[given.type])})[0])


def test_numpy(exported):
    policy, directory = exported
    alone = load_numpy(directory)
    check(policy, alone)
    obs = observations(policy, 6)
    one, grid = alone(obs[0]), alone(obs.reshape(2, 3, *obs.shape[1:]))
    shape = policy.agent.action_space.shape
    assert (one.shape, grid.shape) == (shape, (2, 3, *shape))
    np.testing.assert_allclose(one, alone(obs)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grid.reshape(6, *shape), alone(obs), rtol=1e-5, atol=1e-6)
    with np.load(directory / "policy.npz", allow_pickle=False) as file:
        assert not any("value" in name or array.dtype == object for name, array in file.items())


def test_numpy_knows_every_activation():
    x = np.float32([-1e4, -100, -3, -0.1, 0, 0.1, 3, 100, 1e4])
    # Below level 1, XLA's tanh, as gelu has it, is not as exact.
    as_trained = {"xla_backend_optimization_level": 1}
    assert numpy_policy.ACTIVATIONS.keys() == ACTIVATIONS.keys()
    for name, activation in ACTIVATIONS.items():
        result = numpy_policy.ACTIVATIONS[name](x)
        assert result.dtype == np.float32
        expected = jax.jit(activation, compiler_options=as_trained)(x)
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)


def test_numpy_policy_needs_numpy_alone(tmp_path):
    policy = make_policy(*CASES["normalised tanh"])
    export(policy, tmp_path / "out")
    code = (
        "import sys; from policy import Policy; action = Policy('policy.npz')([0.5, -1, 2, 3]);"
        "assert not {'jax', 'purejaxppo'} & sys.modules.keys(); print(action.tolist())"
    )
    shown = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path / "out")
    expected = policy(np.array([0.5, -1, 2, 3]))
    np.testing.assert_allclose(json.loads(shown), expected, rtol=1e-5, atol=1e-6)


def test_files_and_facts(tmp_path):
    written = export(make_policy(*CASES["half-open"]), tmp_path / "a" / "b")
    assert sorted(written) == sorted((tmp_path / "a" / "b").iterdir())
    names = {"policy.stablehlo", "policy.npz", "policy.py", "policy.json"}
    assert {path.name for path in written} - {"policy.onnx"} == names
    facts = json.loads((tmp_path / "a" / "b" / "policy.json").read_text())
    assert facts.pop("versions")["jax"] == jax.__version__
    assert facts == {
        "env": "CartPole-v1",
        "env_args": {},
        "images": {"grayscale": False, "resize": None, "frame_stack": 1},
        "observation_space": {
            "type": "Box", "low": None, "high": None, "shape": [4], "dtype": "float32",
        },
        "action_space": {
            "type": "Box", "low": [None, None, -1.0], "high": [None, 0.5, 1.0], "shape": [3],
            "dtype": "float32",
        },
        "memory": 0,
        "run": 3,
        "seed": 14,
        "swept": {"torso_layers": [32, 32], "max_grad_norm": None},
        "iteration": 159,
    }  # fmt: skip


def test_the_same_policy_gives_the_same_files_and_nothing_of_this_machine(tmp_path):
    contents = []
    for name in ("a", "b"):
        written = export(make_policy(*CASES["discrete"]), tmp_path / name)
        contents.append({path.name: path.read_bytes() for path in written})
    assert contents[0] == contents[1]
    here = str(Path(numpy_policy.__file__).parent).encode()
    assert not any(here in content for content in contents[0].values())


def test_without_onnx_the_rest_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "purejaxppo.onnx_policy", raising=False)
    written = export(make_policy(*CASES["discrete"]), tmp_path)
    assert {path.suffix for path in written} == {".stablehlo", ".npz", ".py", ".json"}


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "other").write_text("mine")
    for path in (tmp_path, tmp_path / "other", tmp_path / "other" / "below"):
        with pytest.raises(ConfigError, match=f"--output {path}: (in use|Not a directory)"):
            export(make_policy(*CASES["discrete"]), path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_an_error_leaves_no_half_file(tmp_path, monkeypatch):
    written, write = [], Path.write_bytes

    def fill_disk(path, data):
        written.append(path)
        if len(written) == 3:
            write(path, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        export(make_policy(*CASES["discrete"]), tmp_path)
    assert len(written) == 3
    assert not list(tmp_path.iterdir())


def test_a_trained_policy_plays_in_gymnasium(tmp_path, capsys):
    """Little is learned in so few steps, but far more than the 9 of doing always the same."""
    pytest.importorskip("gymnasium")
    from scripts import play_gymnasium

    small = "--num-envs 8 --num-steps 64 --learning-rate 3e-3 --torso-layers 32 --eval-episodes 0"
    run_dir = str(tmp_path / "run")
    options = f"{small} --env CartPole-v1 --total-timesteps 16384 --run-dir {run_dir}"
    assert cli.train_command(options.split()) == 0
    capsys.readouterr()
    assert play_gymnasium.main([run_dir, "--episodes", "5"]) == 0
    name, _, mean, _, std, *rest = capsys.readouterr().out.split()
    assert (name, rest) == ("CartPole-v1:", ["in", "5", "episodes"])
    assert 100 < float(mean) <= 500
    assert float(std) >= 0
    assert play_gymnasium.main([str(tmp_path / "none")]) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_numpy_that_acts_otherwise_is_refused(tmp_path, monkeypatch):
    """As after a change of the network alone."""
    monkeypatch.setitem(numpy_policy.ACTIVATIONS, "tanh", np.sign)
    for case in ("clipped", "discrete"):
        with pytest.raises(ConfigError, match=r"numpy_policy.py acts otherwise .* of 100 observ"):
            export(make_policy(*CASES[case]), tmp_path)
    with pytest.raises(ConfigError, match="otherwise"):
        export(make_policy(*REMEMBERING["memory"]), tmp_path)
    assert not any(tmp_path.iterdir())
