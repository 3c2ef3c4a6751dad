"""Attention as TensorRT takes it: a mask or causal, a mask that is finite, a scale with a root."""

from pathlib import Path

import onnx
import pytest
import torch
from programs import TOKENS, Function, captured
from tensorrt_networks import network_of, nodes_in, order_of, run_network, value_types
from torch import Tensor

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.exporters.tensorrt.lower import tensorrt_onnx

attention = torch.ops.enginecast.attention
HEADS, WIDTH = 4, 32
FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
Inputs = tuple[Tensor, ...]


def flat(tokens: int) -> Tensor:
    return torch.randn(2, tokens, WIDTH)


def seen() -> Tensor:
    """Keys that each row of a batch may see; the last token of the second row sees none, and with
    `causal` the first one neither.
    """
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, :, 3:] = False
    mask[1, :, :, 0] = False
    mask[1, :, 4] = False
    return mask


def seen_by_heads() -> Tensor:
    """The first head sees all keys."""
    return torch.cat([torch.ones(2, 1, 5, 5, dtype=torch.bool), *[seen()] * (HEADS - 1)], 1)


def cases() -> dict[str, tuple[Inputs, float, bool]]:
    """Name -> inputs, scale, whether causal."""
    torch.manual_seed(2)
    q, longer, bias = flat(5), flat(7), torch.randn(2, HEADS, 5, 5)
    return {
        "bool": ((q, q, q, seen()), 0.3, False),
        "bool of half": ((q.half(), q.half(), q.half(), seen()), 0.3, False),
        "bool, causal": ((q, q, q, seen()), 0.3, True),
        "bool of each head": ((q, q, q, seen_by_heads()), 0.3, False),
        "bool, heads first": (
            (*[q.unflatten(2, (HEADS, -1)).transpose(1, 2)] * 3, seen()),
            0.3,
            False,
        ),
        "bias, causal": ((q, q, q, bias), 0.3, True),
        "causal, longer keys": ((q, longer, longer), 0.3, True),
        "negative": ((q, q, q), -0.3, False),
        "narrow values": ((q, longer, longer[..., :16]), 0.3, False),
        "wide values": ((torch.randn(2, 5, 16), torch.randn(2, 5, 16), q), 0.3, False),
        "bias of fp32": ((q.half(), q.half(), q.half(), bias), 0.3, False),
    }


QUICK = (
    *("bool, causal", "bool of half", "bool of each head", "bool, heads first"),
    *("causal, longer keys", "narrow values", "wide values"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in cases()]
)
def test_it_computes_the_same_in_what_tensorrt_takes(name: str, tmp_path: Path) -> None:
    inputs, scale, causal = cases()[name]

    def attend(*given: Tensor) -> Tensor:
        bias = given[3] if len(given) > 3 else None
        found: Tensor = attention(*given[:3], bias, HEADS, HEADS, scale, causal)
        return found

    network = network_of(captured(Function(attend), *inputs), tmp_path)
    (node,) = [n for n in nodes_in(network.graph) if n.op_type == "Attention"]
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    has_mask = len(node.input) > 3
    assert given["scale"] > 0
    assert not (given["is_causal"] and has_mask)
    dtype = FLOAT16 if inputs[0].dtype == torch.float16 else FLOAT
    assert {value_types(network)[found] for found in node.input} == {dtype}
    (found,) = run_network(network, *inputs)
    wide = [x if x.dtype == torch.bool else x.double() for x in inputs]
    expected = attend(*wide)
    step = torch.finfo(inputs[0].dtype).eps
    assert found.isfinite().all()
    assert float((found - expected).abs().max()) < 8 * step * float(expected.abs().max())


def test_sizes_that_are_not_known_can_be_masked(tmp_path: Path) -> None:
    def attend(query: Tensor, key: Tensor) -> Tensor:
        found: Tensor = attention(query, key[:, 1:], key[:, 1:], None, HEADS, HEADS, 0.3, True)
        return found

    torch.manual_seed(3)
    dynamic = [{0: TOKENS[0], 1: TOKENS[1]}, {0: TOKENS[0], 1: torch.export.Dim("k", min=3)}]
    with torch.no_grad():
        program = torch.export.export(
            Function(attend), (flat(5), flat(8)), dynamic_shapes=(tuple(dynamic),), strict=False
        )
    network = network_of(program, tmp_path)
    query, key = torch.randn(3, 9, WIDTH), torch.randn(3, 12, WIDTH)
    (found,) = run_network(network, query, key)
    assert float((found - attend(query, key)).abs().max()) < 1e-5


def test_keys_and_values_are_said_to_be_as_many(tmp_path: Path) -> None:
    """A table of positions fixes the number of keys."""
    table = torch.randn(7, WIDTH)

    def attend(query: Tensor, value: Tensor) -> Tensor:
        found: Tensor = attention(query, query + table, value, None, HEADS, HEADS, 0.3, False)
        return found

    sizes = (None, {1: torch.export.Dim("tokens", min=2, max=9)})
    with torch.no_grad():
        program = torch.export.export(
            Function(attend), (flat(7), flat(7)), dynamic_shapes=(sizes,), strict=False
        )
    model = tensorrt_onnx(order_of(program, tmp_path))
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    assert [value.shape[2] for value in node.inputs[1:3] if value and value.shape] == [7, 7]
