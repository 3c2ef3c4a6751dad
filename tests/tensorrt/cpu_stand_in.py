"""A stand-in for a GPU: CPU memory, one stream, graphs that run anew.

It lets the session of TensorRT engines run with fake_tensorrt.py.  What it proves is the
bookkeeping: which tensors, addresses and shapes are handed over, and in which order.  It proves
nothing about CUDA: no streams overlap, nothing is asynchronous, no graph is recorded.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from enginecast.runtime.device import gpu as gpus
from enginecast.runtime.device.cuda_graphs import Run, Tensors
from enginecast.runtime.device.torch_values import as_tensor, to_host
from enginecast.runtime.values.arrays import Array

STREAM = 0
"""The handle of the one stream."""


class CpuStandIn:
    """What a session asks of a GPU, answered by the CPU."""

    def __init__(self, **facts: str) -> None:
        self.name = facts.get("name", "NVIDIA H200")
        self.arch = facts.get("arch", "sm90")
        self.driver = facts.get("driver", "580.95.05")
        self.cuda = facts.get("cuda", "13")
        self.busy: set[int] = set()
        """Numbers of streams whose work is said not to be done."""
        self.log: list[str] = []
        """What was recorded and replayed."""
        self.refuses = ""
        """Why nothing can be recorded; empty: it can."""
        self._streams = 0
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))

    @property
    def place(self) -> tuple[str, int]:
        return "cpu", 0

    def to_device(self, array: Array) -> Any:
        return as_tensor(array.copy())

    def to_host(self, value: Any) -> Array:
        return to_host(value)

    def new_stream(self) -> int:
        with self._lock:
            self._streams += 1
            return self._streams

    def is_idle(self, stream: int) -> bool:
        return stream not in self.busy

    @contextmanager
    def on(self, stream: int, inputs: Tensors) -> Iterator[Callable[[Tensors], None]]:
        yield lambda tensors: None

    def current_stream(self) -> int:
        return STREAM

    def graph_recorder(self) -> Callable[[Run, Tensors], Run]:
        """As `cuda_graphs.recorder`: inputs and outputs stay where they were; a replay computes
        what the recorded run did, into new tensors.
        """

        def record(run: Run, tensors: Tensors) -> Run:
            if self.refuses:
                raise RuntimeError(self.refuses)
            self.log.append("record")
            inputs = [one.clone() for one in tensors]
            run(inputs)

            def replay(given: Tensors) -> list[Any]:
                self.log.append("replay")
                for own, one in zip(inputs, given, strict=True):
                    own.copy_(one)
                return [one.clone() for one in run(inputs)]

            return replay

        return record


def use_stand_in(monkeypatch: pytest.MonkeyPatch, **facts: str) -> CpuStandIn:
    """Have sessions take a stand-in for the GPU that is not here."""
    made = CpuStandIn(**facts)
    monkeypatch.setattr(gpus, "Gpu", lambda torch: made)
    return made
