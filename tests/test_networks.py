"""Initialisation and wiring of the networks, and how the agent fits them to two spaces."""

import functools

import chex
import flax.linen as nn
import iterations
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import stats
from purejaxppo.activations import ACTIVATIONS, tanh
from purejaxppo.agent import make_agent
from purejaxppo.config import Config, Hyper
from purejaxppo.convolutions import CNN_LAYERS
from purejaxppo.distributions import Categorical, Gaussian, MultiCategorical, TanhGaussian
from purejaxppo.losses import Minibatch, ppo_loss
from purejaxppo.networks import init_params, orthogonal
from purejaxppo.spaces import Box, Discrete, MultiDiscrete
from purejaxppo.values import ConfigError

INF = float("inf")
CARTPOLE = Box(-INF, INF, (4,)), Discrete(2)
PENDULUM = Box(-INF, INF, (3,)), Box(-2.0, 2.0, (1,))
TORQUES = Box((-0.5, -3.0), (2.0, -1.0), (2,))  # no bound the other's negative


@functools.partial(jax.jit, static_argnums=0)
def init(agent, seed, hyper):
    return agent.init(jax.random.key(seed), hyper)


def initialised(observation_space, action_space, hyper=None, seed=0, **options):
    agent = make_agent(Config(**options), observation_space, action_space)
    return agent, init(agent, seed, hyper or Hyper())


def shapes(*spaces, **options):
    agent = make_agent(Config(**options), *spaces)
    return agent, jax.eval_shape(agent.init, jax.random.key(0), Hyper())


def agent_and_params(*spaces, **options):
    """With parameters that are any numbers: to initialise them in earnest takes a compilation."""
    agent, params = shapes(*spaces, **options)
    rng = np.random.default_rng(0)
    return agent, jax.tree.map(lambda leaf: jnp.float32(rng.normal(0, 0.5, leaf.shape)), params)


def apply(agent, params, obs, obs_stats=None):
    return iterations.apply(agent, params, obs_stats, obs, (), jnp.ones(len(obs), bool))


def count(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def gram(kernel):
    """Of the shorter side, which is the orthonormal one."""
    kernel = np.asarray(kernel, np.float64)
    return kernel @ kernel.T if kernel.shape[0] <= kernel.shape[1] else kernel.T @ kernel


def test_orthogonal():
    shapes = [(64, 64), (4, 64), (64, 3), (128, 64), (64, 1), (3, 3, 2, 16)]
    matrices = orthogonal(jax.random.key(0), shapes)
    for matrix, shape in zip(matrices, shapes, strict=True):
        assert matrix.shape == shape
        flat = matrix.reshape(-1, shape[-1])
        np.testing.assert_allclose(gram(flat), np.eye(min(flat.shape)), atol=1e-4)


def test_initial_weights_are_orthogonal_with_the_gain_of_their_layer():
    _, params = initialised(*CARTPOLE, torso_layers=(64, 32), policy_layers=(48,))
    for branch, gain in (("policy", 2), ("value", 2), ("policy_head", 1e-4), ("value_head", 1)):
        layers = params[branch] if "kernel" not in params[branch] else {"": params[branch]}
        assert len(layers) == {"policy": 3, "value": 2}.get(branch, 1)
        for layer in layers.values():
            expected = gain * np.eye(min(layer["kernel"].shape))
            np.testing.assert_allclose(gram(layer["kernel"]), expected, atol=1e-4 * gain)
            np.testing.assert_array_equal(layer["bias"], 0.0)


ATARI = Box(0, 255, (84, 84, 4), "uint8")
MINATAR = Box(0.0, 1.0, (10, 10, 6))


@pytest.mark.parametrize(
    ("space", "torso", "numbers"),
    [
        (ATARI, "torso", [8 * 8 * 4 * 32, 4 * 4 * 32 * 64, 3 * 3 * 64 * 64, 3136 * 512]),
        (Box(0.0, 1.0, (36, 40, 3)), "torso", [6144, 32768, 36864, 64 * 512]),
        (Box(0.0, 1.0, (35, 40, 3)), "torso", [8 * 8 * 3 * 16, 4 * 4 * 16 * 32, 2 * 3 * 32 * 256]),
        (Box(0.0, 1.0, (20, 20, 1)), "torso", [1024, 8192, 32 * 256]),
        (Box(0.0, 1.0, (19, 20, 1)), "torso", [3 * 3 * 16, 17 * 18 * 16 * 128]),
        (MINATAR, "torso", [3 * 3 * 6 * 16, 1024 * 128]),
        (Box(0.0, 1.0, (2, 9, 3)), "policy", [54 * 64, 64 * 64]),
        (Box(0.0, 1.0, (10, 10)), "policy", [100 * 64, 64 * 64]),
    ],
)
def test_images_are_convolved_by_default(space, torso, numbers):
    agent, params = shapes(space, Discrete(3))
    layers = params[torso]
    order = sorted(layers, key=lambda name: (name.partition("_")[0], name))
    assert [layers[name]["kernel"].size for name in order] == numbers
    images = torso == "torso"
    assert (agent.network.shared_torso, agent.network.activation) == (
        (True, "relu") if images else (False, "tanh")
    )
    assert ("value" in params) == (not images)
    # All of it can be said otherwise.
    options = {"cnn_layers": (), "shared_torso": False, "activation": "tanh"}
    agent, params = shapes(space, Discrete(3), torso_layers=(8,), **options)
    assert params["policy"]["Dense_0"]["kernel"].shape == (space.size, 8)
    assert "torso" not in params


def test_what_other_parameters_begin_with():
    class Normalised(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(nn.Dense(3)(x))

    class Unknown(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) * self.param("query", nn.initializers.ones, ())

    x, rest = jnp.ones(3), (jax.random.key(0), (jnp.ones(3),), 1.0, 0.0)
    layer = init_params(Normalised(), *rest)["LayerNorm_0"]
    chex.assert_trees_all_equal(layer, {"scale": x, "bias": 0 * x})
    with pytest.raises(ValueError, match=r"init_params: what does \['query'\] begin with"):
        init_params(Unknown(), *rest)


def test_convolutions_are_initialised_orthogonally_too():
    options = {"cnn_layers": ((4, 3, 1), (6, 2, 2)), "torso_layers": (8,)}
    _, params = initialised(MINATAR, Discrete(3), **options)
    for layer in params["torso"].values():
        kernel = np.asarray(layer["kernel"])
        flat = kernel.reshape(-1, kernel.shape[-1])
        np.testing.assert_allclose(gram(flat), 2 * np.eye(min(flat.shape)), atol=2e-4)


def test_bytes_are_scaled_to_one():
    options = {"cnn_layers": ((4, 3, 1),), "torso_layers": (8,)}
    space = Box(0, 255, (5, 5, 2), "uint8")
    agent, params = agent_and_params(space, Discrete(3), **options)
    obs = np.random.default_rng(0).integers(0, 256, (6, 5, 5, 2), np.uint8)
    same, _ = agent_and_params(Box(0.0, 1.0, space.shape), Discrete(3), **options)
    chex.assert_trees_all_close(
        apply(agent, params, jnp.asarray(obs)),
        apply(same, params, jnp.float32(obs / 255)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_units_count_patches_and_outputs():
    agent, _ = shapes(Box(0.0, 1.0, (6, 7, 2)), Discrete(3), cnn_layers=((4, 3, 2),))
    conv = 2 * 3 * (3 * 3 * 2 + 4)  # 2 x 3 places of the kernel
    assert agent.num_units == conv + 128 + 3 + 1


def test_layers_do_not_share_their_weights_and_seeds_differ():
    _, params = initialised(*CARTPOLE, torso_layers=(8, 8))
    kernels = [params[b][f"Dense_{i}"]["kernel"] for b in ("policy", "value") for i in (0, 1)]
    _, others = initialised(*CARTPOLE, torso_layers=(8, 8), seed=1)
    kernels += [others["policy"]["Dense_1"]["kernel"]]
    for i, a in enumerate(kernels):
        for b in kernels[:i]:
            assert a.shape != b.shape or np.max(np.abs(a - b)) > 0.1


@pytest.mark.parametrize("log_std", ["parameter", "state"])
@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_log_std_starts_at_init_log_std(log_std, distribution):
    hyper = Hyper(init_log_std=-0.7)
    options = {"log_std": log_std, "action_distribution": distribution, "torso_layers": (8,)}
    agent, params = initialised(PENDULUM[0], Box(-1.0, 1.0, (2,)), hyper, **options)
    obs = jnp.float32(np.random.default_rng(0).normal(size=(6, 3)))
    policy = apply(agent, params, obs).policy
    assert policy.log_std.shape == (6, 2)
    # A head's weights have a gain of 0.01 and tanh features are below 1.
    tolerance = 0 if log_std == "parameter" else 0.01 * np.sqrt(8)
    np.testing.assert_allclose(policy.log_std, np.full((6, 2), -0.7), atol=tolerance + 1e-6)
    assert np.ptp(policy.log_std[:, 0]) > 0 or log_std == "parameter"


def test_a_state_dependent_log_std_stays_in_a_sane_range():
    agent, params = agent_and_params(*PENDULUM, log_std="state", torso_layers=(8,))
    params["log_std_head"]["bias"] = jnp.array([1e6])
    policy = apply(agent, params, jnp.zeros((1, 3))).policy
    np.testing.assert_allclose(policy.log_std, [[2.0 + np.log(2.0)]], rtol=1e-6)


def loss_gradient(shared, only):
    """Gradient of the value loss or the policy's part of the loss, for all parameters."""
    agent, params = agent_and_params(*CARTPOLE, torso_layers=(8,), shared_torso=shared)
    rng = np.random.default_rng(0)
    numbers = jnp.float32(rng.normal(size=(4, 10)))
    batch = Minibatch(
        obs=jnp.float32(rng.normal(size=(10, 4))),
        first=jnp.zeros(10, bool),
        noise=jnp.zeros((10, 2)),
        action=jnp.arange(10) % 2,
        log_prob=jnp.full(10, np.log(0.5), jnp.float32),
        value=numbers[1],
        advantage=numbers[2],
        target=numbers[3],
        weight=jnp.ones(10),
    )
    hyper = Hyper(clip_eps=0.2, ent_coef=0.01, vf_coef=0.5)

    def loss(params):
        output = apply(agent, params, batch.obs)
        total, metrics = ppo_loss(output.policy, output.value, batch, hyper)
        value_loss = hyper.vf_coef * metrics.value_loss
        return value_loss if only == "value" else total - value_loss

    norms = jax.tree.map(lambda g: float(jnp.max(jnp.abs(g))), jax.grad(loss)(params))
    return {name: max(jax.tree.leaves(branch)) for name, branch in norms.items()}


@pytest.mark.parametrize(("only", "other"), [("value", "policy"), ("policy", "value")])
def test_separate_torsos_do_not_feel_each_others_loss(only, other):
    gradient = loss_gradient(shared=False, only=only)
    assert set(gradient) == {"policy", "value", "policy_head", "value_head"}
    assert gradient[other] == gradient[f"{other}_head"] == 0
    assert gradient[only] > 1e-5
    assert gradient[f"{only}_head"] > 1e-5


@pytest.mark.parametrize(("only", "other"), [("value", "policy"), ("policy", "value")])
def test_a_shared_torso_feels_both_losses(only, other):
    gradient = loss_gradient(shared=True, only=only)
    assert set(gradient) == {"torso", "policy_head", "value_head"}
    assert gradient["torso"] > 1e-5
    assert gradient[f"{other}_head"] == 0


def test_number_of_parameters():
    # CartPole: policy and value 4 -> 64 -> 64 each, then 2 logits and 1 value.
    torso = (4 * 64 + 64) + (64 * 64 + 64)
    assert count(shapes(*CARTPOLE)[1]) == 2 * torso + (64 * 2 + 2) + 65 == 9155
    assert count(shapes(*CARTPOLE, shared_torso=True)[1]) == torso + 130 + 65
    # Pendulum: 3 -> 64 -> 64, 1 mean, 1 value, and the log standard deviation.
    torso = (3 * 64 + 64) + (64 * 64 + 64)
    assert count(shapes(*PENDULUM)[1]) == 2 * torso + 65 + 65 + 1 == 8963
    assert count(shapes(*PENDULUM, log_std="state")[1]) == 2 * torso + 65 + 65 + 65
    # Layers after the torso: the policy's 64 -> 16, the value's 64 -> 8 -> 4.
    own = {"policy_layers": (16,), "value_layers": (8, 4)}
    heads = (64 * 16 + 16) + (16 * 1 + 1) + (64 * 8 + 8) + (8 * 4 + 4) + (4 + 1) + 1
    assert count(shapes(*PENDULUM, **own)[1]) == 2 * torso + heads
    assert count(shapes(*PENDULUM, shared_torso=True, **own)[1]) == torso + heads


def numpy_network(params, branch, x, activation):
    for layer in params[branch].values():
        x = activation(x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]))
    head = params[f"{branch}_head"]
    return x @ np.asarray(head["kernel"]) + np.asarray(head["bias"])


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_forward_pass_equals_numpy(activation):
    functions = {
        "tanh": np.tanh,
        "relu": lambda x: np.maximum(x, 0),
        "swish": lambda x: x / (1 + np.exp(-x)),
        "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    }
    agent, params = agent_and_params(*CARTPOLE, torso_layers=(8, 8), activation=activation)
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    output = apply(agent, params, jnp.asarray(obs))
    for branch, actual in (("policy", output.policy.logits), ("value", output.value[:, None])):
        expected = numpy_network(params, branch, obs, functions[activation])
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [0, 1])  # XLA's effort, of quick programs and of others
def test_tanh_is_exact_to_float32(level):
    compiled = functools.partial(
        jax.jit, compiler_options={"xla_backend_optimization_level": level}
    )
    x = np.concatenate([np.linspace(-12, 12, 300_001), np.geomspace(1e-30, 1, 10_000)])
    x = x.astype(np.float32)
    y, slope = compiled(jax.vmap(jax.value_and_grad(tanh)))(x)
    expected = np.tanh(x.astype(float))
    np.testing.assert_allclose(y, expected, rtol=5e-7)
    assert np.abs(y).max() <= 1
    np.testing.assert_allclose(slope, 1 - expected**2, atol=1e-6)
    np.testing.assert_array_equal(compiled(tanh)(-x), -y)
    ends = compiled(tanh)(np.float32([-INF, -1e30, -0.0, 1e30, INF, np.nan]))
    np.testing.assert_allclose(ends, [-1, -1, 0, 1, 1, np.nan], rtol=5e-7)


def features(observation_space, obs, obs_stats=None):
    """What the first layer sees: layers of none leave the value head, made the identity's sum."""
    agent, params = agent_and_params(observation_space, Discrete(2), torso_layers=())

    def read(row):
        params["value_head"] = {"kernel": row[:, None], "bias": jnp.zeros(1)}
        return apply(agent, params, obs, obs_stats).value

    return np.stack([read(row) for row in jnp.eye(len(params["value_head"]["kernel"]))], axis=-1)


def test_a_discrete_observation_is_one_hot():
    np.testing.assert_array_equal(features(Discrete(4), jnp.array([2, 0, 3])), np.eye(4)[[2, 0, 3]])


def test_a_box_of_integers_is_read_as_numbers():
    obs = jnp.array([[3, 250], [0, 7]], jnp.int32)
    np.testing.assert_array_equal(features(Box(0, 255, (2,), "int32"), obs), [[3, 250], [0, 7]])


def test_a_box_of_several_dimensions_is_flattened_in_c_order():
    obs = jnp.arange(12.0).reshape(2, 2, 3)
    actual = features(Box(-INF, INF, (2, 3)), obs)
    np.testing.assert_array_equal(actual, np.arange(12.0).reshape(2, 6))


def test_a_box_without_dimensions_is_one_feature():
    np.testing.assert_array_equal(features(Box(0.0, 1.0, ()), jnp.array([0.5, 2.0])), [[0.5], [2]])


def test_statistics_are_applied_before_flattening():
    obs = jnp.arange(8.0).reshape(2, 2, 2)
    moments = stats.Moments(
        jnp.array(2.0), jnp.full((2, 2), 1.0), jnp.full((2, 2), 4.0), jnp.array(0.0)
    )
    actual = features(Box(-INF, INF, (2, 2)), obs, moments)
    np.testing.assert_allclose(actual, (np.arange(8.0).reshape(2, 4) - 1) / 2, rtol=1e-6)


def test_no_images_at_all():
    agent, params = agent_and_params(MINATAR, Discrete(3))
    assert apply(agent, params, jnp.zeros((0, *MINATAR.shape))).policy.mode().shape == (0,)


def test_any_number_of_leading_axes():
    agent, params = agent_and_params(*CARTPOLE, torso_layers=(8,))
    obs = jnp.float32(np.random.default_rng(0).normal(size=(3, 5, 4)))
    stacked = iterations.apply(agent, params, None, obs, (), jnp.zeros((3, 5), bool))
    assert stacked.value.shape == (3, 5)
    assert stacked.policy.logits.shape == (3, 5, 2)
    flat = apply(agent, params, obs.reshape(15, 4))
    np.testing.assert_allclose(stacked.value.reshape(15), flat.value, rtol=1e-5)


def test_gaussian_is_centred_and_scaled_to_an_asymmetric_box():
    agent, params = agent_and_params(PENDULUM[0], TORQUES, torso_layers=(8,))
    params["policy_head"] = {"kernel": jnp.zeros((8, 2)), "bias": jnp.array([0.0, 0.5])}
    params["log_std"] = jnp.zeros(2)
    policy = apply(agent, params, jnp.ones((4, 3))).policy
    assert isinstance(policy, Gaussian)
    # Half-widths 1.25 and 1 around 0.75 and -2, and a log standard deviation of 0 in them.
    np.testing.assert_allclose(policy.mean, np.tile([0.75, -1.5], (4, 1)), rtol=1e-6)
    np.testing.assert_allclose(np.exp(policy.log_std), np.tile([1.25, 1.0], (4, 1)), rtol=1e-6)
    np.testing.assert_array_equal(policy.low, [-0.5, -3.0])
    np.testing.assert_array_equal(policy.high, [2.0, -1.0])


def test_gaussian_on_an_unbounded_side_keeps_its_own_units():
    space = Box((-INF, 0.0, -INF), (INF, INF, 5.0), (3,))
    agent, params = agent_and_params(PENDULUM[0], space, torso_layers=(8,))
    params["policy_head"] = {"kernel": jnp.zeros((8, 3)), "bias": jnp.array([0.3, 0.4, 0.5])}
    params["log_std"] = jnp.array([0.1, -0.2, 0.3])
    policy = apply(agent, params, jnp.ones((1, 3))).policy
    np.testing.assert_allclose(policy.mean, [[0.3, 0.4, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(policy.log_std, [[0.1, -0.2, 0.3]], rtol=1e-6)
    np.testing.assert_array_equal(policy.to_env(jnp.array([[-9.0, -9, 9]])), [[-9.0, 0, 5]])
    gradient = jax.grad(lambda p: jnp.sum(apply(agent, p, jnp.ones((1, 3))).policy.mean))(params)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_spaces_of_arrays_and_lists_may_be_hashed():
    low, high = np.float32([[0.0, -1.0]]), np.array([[1, 2]])
    box = Box(low, high, [1, 2])
    assert box == Box((0.0, -1.0), (1.0, 2.0), (1, 2))
    assert Box(-1.0, 1.0, 2) == Box(-1.0, 1.0, (2,))
    assert len({box, Box(low, high, (1, 2)), MultiDiscrete([3, 2]), MultiDiscrete((3, 2))}) == 2


def test_a_gaussian_starts_within_the_box():
    """Or every sample would be clipped to the same bound, and nothing learned."""
    largest = float(np.finfo(np.float32).max)  # as some write that there is no bound
    space = Box(
        (10.0, -INF, -largest, 3.0, 2.0, -3e38), (INF, -10.0, largest, 7.0, 2.0, 3e38), (6,)
    )
    center, scale = space.center_and_scale
    np.testing.assert_array_equal(center, np.float32([10, -10, 0, 5, 2, 0]))
    np.testing.assert_array_equal(scale, np.float32([1, 1, 1, 2, 1, 3e38]))
    agent, params = agent_and_params(PENDULUM[0], space, torso_layers=(8,))
    params["policy_head"] = jax.tree.map(jnp.zeros_like, params["policy_head"])
    policy = apply(agent, params, jnp.ones((1, 3))).policy
    np.testing.assert_array_equal(policy.mean, [center])
    np.testing.assert_array_equal(policy.to_env(policy.mean + 1), [[11, -10, 1, 6, 2, 1]])


@pytest.mark.parametrize(
    ("space", "wanted", "kind"),
    [
        (Discrete(3), "auto", Categorical),
        (Discrete(3), "categorical", Categorical),
        (MultiDiscrete((2, 3)), "auto", MultiCategorical),
        (TORQUES, "auto", Gaussian),
        (TORQUES, "gaussian", Gaussian),
        (TORQUES, "tanh_gaussian", TanhGaussian),
    ],
)
def test_the_action_space_decides_the_distribution(space, wanted, kind):
    options = {"action_distribution": wanted, "torso_layers": (8,)}
    agent, params = agent_and_params(CARTPOLE[0], space, **options)
    policy = apply(agent, params, jnp.ones((2, 4))).policy
    assert isinstance(policy, kind)
    action = policy.mode()
    assert action.shape == (2, *space.shape)
    assert policy.log_prob(action).shape == (2,)


@pytest.mark.parametrize(
    ("options", "observation_space", "action_space", "message"),
    [
        ({"action_distribution": "gaussian"}, *CARTPOLE, "gaussian does not fit.*Discrete"),
        ({"action_distribution": "tanh_gaussian"}, CARTPOLE[0], MultiDiscrete((2, 2)), "Multi"),
        ({"action_distribution": "categorical"}, *PENDULUM, "categorical does not fit.*Box"),
        ({"action_distribution": "tanh_gaussian"}, CARTPOLE[0], Box(0.0, INF, (1,)), "finite"),
        ({"action_distribution": "tanh_gaussian"}, CARTPOLE[0], Box((0.0, -INF), 1.0, (2,)), "fin"),
        ({}, CARTPOLE[0], Box(0, 3, (2,), "int32"), "whole numbers"),
        ({}, CARTPOLE[0], Box(0.0, 1.0, (0,)), "nothing to choose among its actions"),
        ({}, CARTPOLE[0], MultiDiscrete(()), "nothing to choose among its actions"),
        ({}, CARTPOLE[0], MultiDiscrete((2, 0)), "nothing to choose among its actions"),
        ({}, CARTPOLE[0], Discrete(-1), "nothing to choose among its actions"),
        ({}, CARTPOLE[0], Discrete(0), "nothing to choose among its actions"),
        ({}, MultiDiscrete((2, 2)), Discrete(2), "observations.*not supported"),
        ({"normalize_observations": True}, Discrete(4), Discrete(2), "--normalize-observations"),
        ({"cnn_layers": ((8, 3, 1),)}, *CARTPOLE, "8x3x1 does not fit the observations of .*4"),
        ({"cnn_layers": CNN_LAYERS["nature"]}, MINATAR, Discrete(2), "nature .* 4 does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(options, observation_space, action_space, message):
    config = Config(env="Thing-v0", **options)
    with pytest.raises(ConfigError, match=message) as error:
        make_agent(config, observation_space, action_space)
    assert "Thing-v0" in str(error.value)
