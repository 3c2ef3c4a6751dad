"""An attention of a network in the fake TensorRT, which a parser has read.

A fake: see tests/tensorrt/fake_tensorrt.py.
"""

from fake_tensorrt_base import Recorded, attribute


class IAttention(Recorded):
    def _start(self) -> None:
        pass

    decomposable = attribute("decomposable", False)
