"""A root-mean-square norm in fp32, which stays one op until TensorRT's layers are made."""

from torch import Tensor
from torch.nn import functional

from enginecast.ops.traits import Trait, operator


@operator(Trait.SENSITIVE, fake=lambda x, *_: x.new_empty(x.shape), form_of="tensorrt")
def whole_rms_norm(x: Tensor, dims: int, weight: Tensor | None, epsilon: float) -> Tensor:
    """`aten.rms_norm` over the last dims: computed in fp32, the product with the weight included.

    Args:
        x: any float dtype.
        dims: how many of the last dims are normalized.
        weight: of the shape of those dims, any float dtype.
        epsilon: added to the mean of squares.

    Returns:
        Shape and dtype of x.
    """
    scale = None if weight is None else weight.float()
    found = functional.rms_norm(x.float(), list(x.shape[x.dim() - dims :]), scale, epsilon)
    return found.to(x.dtype).contiguous()
