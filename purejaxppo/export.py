"""A policy to take away, in formats that need nothing of this package to run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array

from purejaxppo import machine, numpy_policy, stats
from purejaxppo.agent import Agent, is_bytes
from purejaxppo.files import replacing
from purejaxppo.policy import Policy, act, step
from purejaxppo.spaces import Box, Discrete, MultiDiscrete, Space
from purejaxppo.types import PyTree
from purejaxppo.values import ConfigError, to_json

Arrays = dict[str, np.ndarray]

_EXAMPLES = 100


def export(policy: Policy, directory: Path) -> list[Path]:
    """Writes the deterministic policy, with its normaliser and the bounds of its actions inside.

    All take observations [b, *observation_space.shape] of any batch size b, of the space's dtype
    (int32 for a Discrete one), and give actions [b, *action_space.shape]. A policy with a memory takes
    it after them and gives the next one after these, [b, H], zeros where an episode begins:

    - `policy.stablehlo`: for `jax.export.deserialize(...).call(obs)` on CPU, CUDA and TPU.
    - `policy.onnx`: input `obs`, output `action`, and for a memory `memory` and `memory_after`; only where
      the extra `onnx` is installed.
    - `policy.npz` and `policy.py`: arrays, and the few lines of numpy that act with them.
    - `policy.json`: what it is a policy for, and where it comes from.

    Returns:
        The files written, all or none of them.

    Raises:
        ConfigError: the directory is in use, or cannot be made; numpy would act otherwise.
        OSError: a file cannot be written.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"--output {directory}: in use; give another, or remove it first")
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {directory}: {error.strerror}") from None
    arrays, npz = make_arrays(policy), io.BytesIO()
    np.savez(npz, **arrays)  # type: ignore[arg-type]
    _check(policy, npz)
    files = {
        "policy.stablehlo": make_stablehlo(policy),
        "policy.npz": npz.getvalue(),
        "policy.py": Path(numpy_policy.__file__).read_bytes(),
        "policy.json": to_json(make_facts(policy)).encode(),
    }
    with contextlib.suppress(ImportError):  # the extra is not installed
        from purejaxppo.onnx_policy import make_onnx

        files["policy.onnx"] = make_onnx(arrays, _input_dtype(policy))
    return _write(directory, files)


def _check(policy: Policy, npz: io.BytesIO) -> None:
    """Raises ConfigError where numpy acts otherwise than a network that was changed without it."""
    npz.seek(0)
    exported, obs = numpy_policy.Policy(npz), _examples(policy)
    memory = own = None
    for _ in range(2):  # with a memory of nothing, and of something
        expected, own = policy.step(obs, own)
        action, memory = exported.step(obs, memory)
    # Rounding may decide between choices that are as good as each other.
    tolerance = 0.02 * np.abs(expected).max(axis=0)  # of every number of an action by itself
    same = np.isclose(action, expected, rtol=0.0, atol=tolerance).reshape(_EXAMPLES, -1).all(axis=1)
    if same.mean() < 0.9:
        raise ConfigError(
            f"numpy_policy.py acts otherwise than the network, for {np.sum(~same)} of {_EXAMPLES} observations: "
            "what has been changed in networks.py or agent.py is to be changed there, too"
        )


def _examples(policy: Policy) -> np.ndarray:
    """Observations of any kind, as many as `_EXAMPLES`."""
    rng, space = np.random.default_rng(0), policy.agent.observation_space
    shape, dtype = (_EXAMPLES, *space.shape), _input_dtype(policy)
    if not np.issubdtype(dtype, np.floating):
        high = space.n if isinstance(space, Discrete) else 256 if is_bytes(space) else 2
        return rng.integers(0, high, shape).astype(dtype)
    numbers = rng.normal(size=shape).astype(np.float32)
    seen = policy.obs_stats
    return numbers if seen is None else np.asarray(seen.mean + numbers * np.sqrt(seen.var))


def make_stablehlo(policy: Policy) -> bytes:
    """`act`, or `step`, as serialised StableHLO, with XLA's own operations: it is for any device."""
    network = policy.agent.network.clone(convolution="xla", dense="xla")
    agent = dataclasses.replace(policy.agent, network=network)
    (size,) = jax.export.symbolic_shape("b")
    shape = size, *policy.agent.observation_space.shape
    seen: list[Any] = [jax.ShapeDtypeStruct(shape, _input_dtype(policy))]
    function = act
    if network.gru_units:
        seen += [jax.ShapeDtypeStruct((size, network.gru_units), np.float32)]
        function = _remembering
    program = jax.jit(functools.partial(function, agent, policy.params, policy.obs_stats))
    # Else the paths of all source files that led there would be in the program.
    option = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, option)
    jax.config.update(option, 0)
    try:
        exported = jax.export.export(program, platforms=("cpu", "cuda", "tpu"))(*seen)
    finally:
        jax.config.update(option, before)
    return bytes(exported.serialize())


def make_arrays(policy: Policy) -> Arrays:
    """The way from observation to action, and nothing of the value's; see `numpy_policy`."""
    agent, params = policy.agent, jax.device_get(policy.params)
    named: dict[str, Any] = {
        "activation": agent.network.activation,
        "observation_shape": np.array(agent.observation_space.shape, int),
        "action_shape": np.array(agent.action_space.shape, int),
    }
    if isinstance(agent.observation_space, Discrete):
        named["num_observations"] = agent.observation_space.n
    if policy.obs_stats is not None:
        mean, var = jax.device_get((policy.obs_stats.mean, policy.obs_stats.var))
        std, clip = np.sqrt(var + np.float32(stats.EPSILON)), np.float32(stats.CLIP)
        named |= {"obs_mean": mean, "obs_std": std, "obs_clip": clip}
    elif is_bytes(agent.observation_space):
        named |= {
            "obs_mean": np.float32(0.0),
            "obs_std": np.float32(255.0),
            "obs_clip": np.float32(1.0),
        }
    torso, further = (_layers(params.get(part, {})) for part in ("torso", "policy"))
    layers = [*torso, *further, params["policy_head"]]
    if "memory" in params:
        memory, units = params["memory"], agent.network.gru_units
        named |= {f"memory_{name}": array for name, array in memory["inputs"].items()}
        named["memory_recurrent_kernel"] = memory["recurrent_kernel"]
        named["memory_recurrent_bias"] = np.pad(memory["candidate_bias"], (2 * units, 0))
        named["layers_before_memory"] = len(torso)
    for i, layer in enumerate(layers):
        named |= {f"kernel_{i}": layer["kernel"], f"bias_{i}": layer["bias"]}
    for i, (_, _, stride) in enumerate(agent.network.cnn_layers):
        named[f"stride_{i}"] = stride
    named |= {"num_layers": len(layers)} | _head(agent.action_space, agent.squash)
    return {name: np.asarray(value) for name, value in named.items()}


def _remembering(
    agent: Agent, params: PyTree, obs_stats: stats.Moments | None, obs: Array, memory: Array
) -> tuple[Array, Array]:
    """`step` in the midst of episodes."""
    return step(agent, params, obs_stats, obs, memory, jnp.zeros(obs.shape[0], bool))


def _layers(torso: dict[str, Any]) -> list[Any]:
    """In their order."""
    return [torso[name] for name in sorted(torso, key=_place)]


def _place(name: str) -> tuple[str, int]:
    """Where in a torso a layer stands, as Conv_0 or Dense_10 says."""
    kind, _, number = name.partition("_")
    return kind, int(number)


def _head(space: Space, squash: bool) -> dict[str, Any]:
    """What makes an action of the network's output."""
    match space:
        case Discrete(n):
            return {"nvec": [n]}
        case MultiDiscrete(nvec):
            return {"nvec": nvec}
        case Box():
            low, high = (bound.ravel() for bound in space.bounds)
            center, scale = map(np.ravel, space.center_and_scale)
            return {"squash": squash, "center": center, "scale": scale, "low": low, "high": high}


def make_facts(policy: Policy) -> dict[str, Any]:
    """What it is a policy for, and where it comes from, as plain JSON; null is no bound."""
    return {
        "env": policy.config.env,
        "env_args": policy.config.env_options,
        "images": {n: getattr(policy.config, n) for n in ("grayscale", "resize", "frame_stack")},
        "observation_space": _facts_of(policy.agent.observation_space),
        "action_space": _facts_of(policy.agent.action_space),
        "memory": policy.agent.network.gru_units,
        "run": policy.run.number,
        "seed": policy.run.seed,
        "swept": policy.run.setting.swept,
        "iteration": policy.iteration,
        "versions": machine.versions(),
    }


def _facts_of(space: Space) -> dict[str, Any]:
    return {"type": type(space).__name__, **dataclasses.asdict(space)}


def _input_dtype(policy: Policy) -> np.dtype:
    """Of observations, as JAX has it: float32 for float64."""
    space = policy.agent.observation_space
    return jax.dtypes.canonicalize_dtype(space.dtype if isinstance(space, Box) else np.int32)


def _write(directory: Path, files: dict[str, bytes]) -> list[Path]:
    with contextlib.ExitStack() as stack:
        for name, data in files.items():
            stack.enter_context(replacing(directory / name)).write_bytes(data)
    return [directory / name for name in files]
