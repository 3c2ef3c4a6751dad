"""A lookup of what bytes stand for."""

from torch import Tensor

from enginecast.ops.traits import operator


@operator(fake=lambda raw, table: table.new_empty(raw.shape), form_of="onnx")
def values_of_bytes(raw: Tensor, table: Tensor) -> Tensor:
    """What bytes stand for.

    Args:
        raw: uint8.
        table: [256].

    Returns:
        Shape of raw, dtype of the table.
    """
    return table[raw.int()]
