"""Let TensorRT take an attention apart for which it has no fused kernel.

Unless `IAttention.decomposable` is set, such a network is refused when it is built, and which
kernels there are depends on dtype, head size, mask and GPU (NVIDIA's API reference of IAttention,
and https://github.com/NVIDIA/TensorRT-Model-Connect/pull/873).  ONNX cannot say it: the
attribute of the parser's own is none of the operator's, and neither onnx.checker nor ONNX Runtime
would take the file.
"""

from typing import Any


def let_attentions_decompose(trt: Any, network: Any) -> int:
    """Set it on every attention of a network that was parsed.

    Args:
        trt: the module tensorrt.
        network: an INetworkDefinition.

    Returns:
        How many there are.
    """
    found = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type != trt.LayerType.ATTENTION_OUTPUT:
            continue
        if not hasattr(layer, "attention"):  # the bindings give a plain ILayer
            layer.__class__ = trt.IAttentionOutputLayer
        layer.attention.decomposable = True
        found += 1
    return found
