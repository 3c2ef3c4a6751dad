"""An attention of a network in the fake TensorRT, which a parser has read.

A fake: see tests/tensorrt/fake_tensorrt.py.
"""

from typing import Any

from fake_tensorrt_base import Recorded, attribute
from fake_tensorrt_build import ILayer


class IAttention(Recorded):
    def _start(self) -> None:
        pass

    decomposable = attribute("decomposable", False)


class IAttentionOutputLayer(ILayer):
    """What a layer of this type is made into by whoever wants its attention."""

    @property
    def attention(self) -> Any:
        if "attention" not in self._arguments:
            self._arguments["attention"] = self._fake._new("IAttention")
        return self._arguments["attention"]
