"""A policy trained with PureJaxPPO, in numpy alone: `Policy("policy.npz")(obs)` is an action.

One with a memory takes and gives it as well: `action, memory = policy.step(obs, memory)`.
`purejaxppo export` puts a copy of this file beside the arrays it reads. It needs nothing else.
"""

import numpy as np

ACTIVATIONS = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "swish": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),  # x * sigmoid(x), never overflowing
    "gelu": lambda x: x * (0.5 + 0.5 * np.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
}


class Policy:
    """Observations to the most likely actions."""

    def __init__(self, path):
        with np.load(path, allow_pickle=False) as file:
            self.arrays = dict(file)
        self.activation = ACTIVATIONS[str(self.arrays["activation"])]

    def __call__(self, obs):
        """Actions [..., *action_shape] for obs [..., *observation_shape], as the environment has it."""
        if "layers_before_memory" in self.arrays:
            raise ValueError("this policy has a memory: step(obs, memory) gives it back, too")
        return self.step(obs)[0]

    def step(self, obs, memory=None):
        """Actions, and the memory [..., H] after them; zeros where an episode begins, None where all do."""
        arrays, obs = self.arrays, np.asarray(obs)
        shape = tuple(arrays["observation_shape"])
        batch = obs.shape[: obs.ndim - len(shape)]
        x = self._features(obs.reshape(int(np.prod(batch)), *shape))
        last = int(arrays["num_layers"]) - 1
        for i in range(last + 1):
            if i == arrays.get("layers_before_memory"):
                x = self._remember(x, memory)
                memory = x.reshape(*batch, -1)
            x = self._layer(i, x) if i == last else self.activation(self._layer(i, x))
        return self._action(x).reshape(batch + tuple(arrays["action_shape"])), memory

    def _remember(self, x, memory):
        """The gated recurrent unit's memory [B, H] after x [B, F]."""
        kernel, bias, own_kernel, own_bias = (
            self.arrays[f"memory_{name}"]
            for name in ("kernel", "bias", "recurrent_kernel", "recurrent_bias")
        )
        units = len(own_kernel)
        memory = np.zeros((len(x), units), np.float32) if memory is None else memory
        memory = np.reshape(memory, (len(x), units))
        new, own = x.reshape(len(x), len(kernel)) @ kernel + bias, memory @ own_kernel + own_bias
        gates = 0.5 + 0.5 * np.tanh(0.5 * (new + own)[:, : 2 * units])  # sigmoid, never overflowing
        reset, update = gates[:, :units], gates[:, units:]
        candidate = np.tanh(new[:, 2 * units :] + reset * own[:, 2 * units :])
        return update * memory + (1 - update) * candidate

    def _layer(self, i, x):
        """A convolution without padding of images [B, H, W, C], or a dense layer."""
        kernel, bias = self.arrays[f"kernel_{i}"], self.arrays[f"bias_{i}"]
        if kernel.ndim == 2:
            return x.reshape(len(x), len(kernel)) @ kernel + bias
        stride, size = int(self.arrays[f"stride_{i}"]), kernel.shape[:2]
        windows = np.lib.stride_tricks.sliding_window_view(x, size, axis=(1, 2))
        return np.tensordot(windows[:, ::stride, ::stride], kernel, ((4, 5, 3), (0, 1, 2))) + bias

    def _features(self, obs):
        """What the network sees: a Discrete observation one-hot, any other normalised."""
        arrays = self.arrays
        if "num_observations" in arrays:
            return (obs[..., None] == np.arange(arrays["num_observations"])).astype(np.float32)
        obs = obs.astype(np.float32)
        if "obs_mean" in arrays:
            obs = (obs - arrays["obs_mean"]) / arrays["obs_std"]
            obs = np.clip(obs, -arrays["obs_clip"], arrays["obs_clip"])
        return obs

    def _action(self, output):
        """Of the network's output [..., O]: logits of every choice, or the mean of a Gaussian."""
        arrays = self.arrays
        if "nvec" in arrays:  # that many choices each
            choices = np.split(output, np.cumsum(arrays["nvec"])[:-1], axis=-1)
            return np.stack([logits.argmax(-1) for logits in choices], -1).astype(np.int32)
        if arrays["squash"]:
            output = np.tanh(output)
        return np.clip(arrays["center"] + arrays["scale"] * output, arrays["low"], arrays["high"])
