"""Samples of pictures at places that are computed: torch.nn.functional.grid_sample."""

from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.registry import refuse, torch_form
from enginecast.passes.ir.edit import arguments
from enginecast.passes.ir.effects import aten

FAR = 16384.0
"""A place, with -1 and 1 at the edges of a picture, that lies outside one of any size, and that
fp16 holds."""
_SAMPLERS = (aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)


def _reaches_far(node: Node) -> bool:
    """Whether places may lie anywhere, and those far off mean the same as those just outside."""
    _, grid, _, padding = arguments(node)[:4]
    is_held = grid.target is aten.clamp.default and tuple(grid.args[1:]) == (-FAR, FAR)
    return padding in (0, 1) and not is_held


refuse(
    *_SAMPLERS,
    when=lambda node: tuple(arguments(node)[2:4]) == (1, 2),
    reason="halfway between two pixels ONNX Runtime reflects to another neighbor than torch",
)


@torch_form(
    *_SAMPLERS,
    when=lambda node: node.target is not aten.grid_sampler.default or _reaches_far(node),
)
def _sampled_near(x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    """With zeros or the border around a picture, as far off as `FAR` all places are alike: beyond
    1e12 ONNX Runtime (1.31) reads any pixel.
    """
    near = grid.clamp(-FAR, FAR) if padding in (0, 1) else grid
    found: Tensor = aten.grid_sampler.default(x, near, mode, padding, aligned)
    return found
