"""What the classes of diffusers keep from low precision, as their `enable_layerwise_casting` does.

    _skip_layerwise_casting_patterns = ["pos_embed", "norm"]      of FluxTransformer2DModel

That keeps `transformer_blocks.0.norm1.linear`, for one: the modulation, whose error every token of
a block gets.
"""

import re
import sys
from functools import cache
from itertools import accumulate
from typing import Any

from enginecast.passes.ir.source import layer_stack
from enginecast.passes.quantize.measure.quantizable import Layer

OVERRIDE = " (sensitive=true quantizes it)"
_DECLARED = "_skip_layerwise_casting_patterns"


def declared_reason(layer: Layer) -> str:
    """Why the model's class keeps a layer; empty: it does not.

    The model is the outermost module around the layer whose class says anything: diffusers does not
    ask the models within a model.
    """
    around = (  # the outermost first
        (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for path, kind in layer_stack(layer.node).values()
    )
    known = ((path, kind, patterns) for path, kind in around if (patterns := _patterns(kind)))
    path, kind, patterns = next(known, ("", "", ()))
    inside = layer.module.removeprefix(path).removeprefix(".")
    within = list(accumulate(inside.split("."), "{}.{}".format))
    kept = (p for p in patterns if any(re.search(p, module) for module in within))
    return next(
        (f"{kind.rpartition('.')[2]} keeps {p!r} from low precision{OVERRIDE}" for p in kept), ""
    )


@cache
def _patterns(kind: str) -> tuple[str, ...]:
    """The patterns of a class, and those that diffusers has for all of its models."""
    module, _, name = kind.rpartition(".")
    # A model that was captured is imported.
    found: Any = getattr(sys.modules.get(module), name, None)
    if not hasattr(found, _DECLARED):
        return ()
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    own = (getattr(found, _DECLARED), found._keep_in_fp32_modules)
    return (*(pattern for each in own for pattern in each or ()), *DEFAULT_SKIP_MODULES_PATTERN)
