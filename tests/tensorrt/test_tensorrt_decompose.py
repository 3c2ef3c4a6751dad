"""Attentions without a fused kernel may be taken apart: set on the network, with the fake."""

from pathlib import Path

import pytest
import torch
from fake_tensorrt import fake_tensorrt
from programs import Function, captured
from tensorrt_networks import network_of
from torch import Tensor

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.exporters.tensorrt.lower import NETWORK_FILE, let_attentions_decompose


def attend(query: Tensor) -> Tensor:
    again: Tensor = torch.ops.enginecast.attention(query, query, query, None, 4, 4, 0.3, False)
    found: Tensor = torch.ops.enginecast.attention(again, query, again, None, 4, 4, 0.3, True)
    return torch.relu(found)


@pytest.mark.parametrize(
    "version", [pytest.param("10.15.1.29+fake", marks=pytest.mark.slow), "11.0.0.114+fake"]
)
def test_every_attention_of_a_parsed_network_may_be_taken_apart(
    version: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network_of(captured(Function(attend), torch.randn(2, 5, 32)), tmp_path)
    fake = fake_tensorrt(version)
    logger = fake.Logger(fake.Logger.ERROR)
    flags = 1 << int(fake.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = fake.Builder(logger).create_network(flags)
    assert fake.OnnxParser(network, logger).parse_from_file(str(tmp_path / NETWORK_FILE))
    assert let_attentions_decompose(fake, network) == 2
    assert fake.called("IAttention.decomposable=") == [{"value": True}] * 2
    kinds = [network.get_layer(index).type for index in range(network.num_layers)]
    assert kinds.count(fake.LayerType.ATTENTION_OUTPUT) == 2
