"""The arrays that `numpy_policy` reads as an ONNX model.

Built by hand: an MLP is a dozen nodes. jax2onnx converts any program, but asks for an Orbax older than
ours (below 0.11.37) and for some twenty packages more, a web server among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx  # pyright: ignore[reportMissingImports]
from onnx import TensorProto, helper, numpy_helper  # pyright: ignore[reportMissingImports]

# The first with every operation used here, so that older runtimes read it too.
_OPSET = 20

Arrays = dict[str, np.ndarray]


class _Graph:
    """Nodes of a graph, and the constants they take."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, operation: str, *inputs: Any, **attributes: Any) -> str:
        """The name of what a new node gives; its inputs are such names, or arrays."""
        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        output = f"{operation}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, names, [output], **attributes))
        return output

    def _constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def make_onnx(arrays: Arrays, dtype: np.dtype) -> bytes:
    """A model from `obs` [b, ...] of this dtype to `action` [b, ...], and from `memory` to `memory_after`."""
    add, last = _Graph(), int(arrays["num_layers"]) - 1
    remembers = "layers_before_memory" in arrays
    x = _features(add, arrays)
    for i in range(last + 1):
        if i == arrays.get("layers_before_memory"):
            x = _memory(add, arrays, x)
        x = _layer(add, arrays, i, x)
        if i < last:
            x = _activation(add, str(arrays["activation"]), x)
    add("Reshape", _action(add, arrays, x), [-1, *arrays["action_shape"]])
    add.nodes[-1].output[:] = ["action"]

    def value(name: str, dtype: np.dtype, shape: np.ndarray) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        return helper.make_tensor_value_info(name, kind, ["b", *shape.tolist()])

    kind = np.dtype(np.int32 if "nvec" in arrays else np.float32)
    inputs = [value("obs", dtype, arrays["observation_shape"])]
    outputs = [value("action", kind, arrays["action_shape"])]
    if remembers:
        size = arrays["memory_recurrent_kernel"].shape[:1]
        inputs.append(value("memory", np.dtype(np.float32), np.array(size)))
        outputs.append(value("memory_after", np.dtype(np.float32), np.array(size)))
    graph = helper.make_graph(add.nodes, "policy", inputs, outputs, add.constants)
    opset = helper.make_opsetid("", _OPSET)
    model = helper.make_model_gen_version(graph, opset_imports=[opset], producer_name="purejaxppo")
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _features(add: _Graph, arrays: Arrays) -> str:
    """[b, ...] one-hot of a Discrete observation, else normalised."""
    if "num_observations" in arrays:
        choices = np.arange(int(arrays["num_observations"]), dtype=np.int32)
        return add(
            "Cast", add("Equal", add("Unsqueeze", "obs", [1]), choices), to=TensorProto.FLOAT
        )
    obs = add("Cast", "obs", to=TensorProto.FLOAT)
    if "obs_mean" in arrays:
        obs = add("Div", add("Sub", obs, arrays["obs_mean"]), arrays["obs_std"])
        obs = add("Clip", obs, -arrays["obs_clip"], arrays["obs_clip"])
    return obs


def _layer(add: _Graph, arrays: Arrays, i: int, x: str) -> str:
    """A convolution of images [b, H, W, C], or a dense layer."""
    kernel, bias = arrays[f"kernel_{i}"], arrays[f"bias_{i}"]
    if kernel.ndim == 2:
        return add("Gemm", add("Flatten", x), kernel, bias)
    strides = [int(arrays[f"stride_{i}"])] * 2
    x = add("Transpose", x, perm=[0, 3, 1, 2])
    x = add("Conv", x, kernel.transpose(3, 2, 0, 1), bias, strides=strides)
    return add("Transpose", x, perm=[0, 2, 3, 1])


def _memory(add: _Graph, arrays: Arrays, x: str) -> str:
    """A gated recurrent unit's memory [b, H] after x, of the one before it."""
    units = len(arrays["memory_recurrent_kernel"])

    def part(x: str, start: int, end: int) -> str:
        return add("Slice", x, [start * units], [end * units], [1])

    new = add("Gemm", add("Flatten", x), arrays["memory_kernel"], arrays["memory_bias"])
    own = add("Gemm", "memory", arrays["memory_recurrent_kernel"], arrays["memory_recurrent_bias"])
    gates = add("Sigmoid", part(add("Add", new, own), 0, 2))
    reset, update = part(gates, 0, 1), part(gates, 1, 2)
    candidate = add("Tanh", add("Add", part(new, 2, 3), add("Mul", reset, part(own, 2, 3))))
    # update * memory + (1 - update) * candidate
    add("Add", candidate, add("Mul", update, add("Sub", "memory", candidate)))
    add.nodes[-1].output[:] = ["memory_after"]
    return "memory_after"


def _activation(add: _Graph, name: str, x: str) -> str:
    match name:
        case "swish":
            return add("Mul", x, add("Sigmoid", x))
        case "gelu":
            return add("Gelu", x, approximate="tanh")
        case _:  # ONNX has tanh, relu and elu by these names
            return add(name.capitalize(), x)


def _action(add: _Graph, arrays: Arrays, output: str) -> str:
    """[b, A] of [b, O] logits of every choice, or the mean of a Gaussian."""
    if "nvec" in arrays:
        ends = np.cumsum(arrays["nvec"])
        parts = zip(ends - arrays["nvec"], ends, strict=True)
        logits = [add("Slice", output, [start], [end], [1]) for start, end in parts]
        chosen = add("Concat", *[add("ArgMax", part, axis=1) for part in logits], axis=1)
        return add("Cast", chosen, to=TensorProto.INT32)
    if arrays["squash"]:
        output = add("Tanh", output)
    action = add("Add", add("Mul", output, arrays["scale"]), arrays["center"])
    return add("Min", add("Max", action, arrays["low"]), arrays["high"])
