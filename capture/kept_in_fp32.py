"""The parameters that transformers leaves in fp32 when it loads a model in fp16.

A model class names them in `_keep_in_fp32_modules`: `wo` for T5, whose output outgrows fp16.
`from_pretrained(dtype=float16)` heeds the list and `.half()` does not, so a module made by a
factory is worse in fp16 than the same weights loaded from a folder
(huggingface/diffusers#8604).
"""

import re

from torch import Tensor, nn
from transformers import PreTrainedModel


def kept_in_fp32(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Each parameter that stays in fp32, with the values it has now.

    Args:
        module: a model of transformers, or one that holds some.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for part in module.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        names = [
            *(getattr(part, "_keep_in_fp32_modules", None) or ()),
            *(getattr(part, "_keep_in_fp32_modules_strict", None) or ()),
        ]
        kept = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)")
        for name, parameter in part.named_parameters():
            if kept.search(name) and parameter.is_floating_point():
                found[parameter] = parameter.detach()
    return found
