"""What sessions ask of a GPU, on one.  Never run so far: no GPU was at hand when it was written."""

import re

import numpy as np
import pytest
import torch

from enginecast.runtime.device.gpu import Gpu
from enginecast.runtime.values.arrays import BFLOAT16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs torch with a CUDA GPU"),
]


@pytest.fixture
def gpu() -> Gpu:
    return Gpu(torch)


def test_it_says_what_it_is(gpu: Gpu) -> None:
    major, minor = torch.cuda.get_device_capability()
    assert gpu.arch == f"sm{major}{minor}"
    assert gpu.name == torch.cuda.get_device_name()
    assert re.fullmatch(r"\d+(\.\d+)+", gpu.driver)
    assert gpu.cuda.isdigit()
    assert gpu.place == ("cuda", torch.cuda.current_device())


def test_arrays_go_there_and_back(gpu: Gpu) -> None:
    array = np.arange(6).reshape(2, 3).astype(BFLOAT16)
    array.flags.writeable = False
    there = gpu.to_device(array)
    assert (there.device.type, there.dtype) == ("cuda", torch.bfloat16)
    np.testing.assert_array_equal(gpu.to_host(there), array)
    assert gpu.empty((2, 5), "float16").shape == (2, 5)


def test_a_stream_works_between_what_the_caller_did_and_does(gpu: Gpu) -> None:
    """Each step takes long on the device; the host waits for none of them."""
    caller = torch.cuda.Stream()
    stream = gpu.new_stream()
    size = 4096
    with torch.cuda.stream(caller):
        one = torch.eye(size, device="cuda")
        for _ in range(20):
            one = one @ torch.eye(size, device="cuda")
        given = one * 2
        with gpu.on(stream, [given]) as hand_over:
            assert gpu.current_stream() == stream.cuda_stream
            made = given @ given
            hand_over([made])
        assert gpu.current_stream() == caller.cuda_stream
        del given
        found = (made + 1).diagonal().cpu()
    assert torch.equal(found, torch.full((size,), 5.0))
    torch.cuda.synchronize()
    assert gpu.is_idle(stream)


def test_a_recorded_run_is_replayed_on_a_stream(gpu: Gpu) -> None:
    stream = gpu.new_stream()
    record = gpu.graph_recorder()
    one = torch.ones(8, device="cuda")
    with gpu.on(stream, [one]):
        replay = record(lambda tensors: [tensors[0] * 3], [one])
    for value in (1.0, 2.0):
        given = torch.full((8,), value, device="cuda")
        with gpu.on(stream, [given]) as hand_over:
            (made,) = replay([given])
            hand_over([made])
        assert torch.equal(made.cpu(), torch.full((8,), 3 * value))
