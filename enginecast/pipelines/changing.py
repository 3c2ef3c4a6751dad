"""Methods of a pipeline that change the weights of its components, refused where these are engines.

A pipeline looks for PEFT, reads files, and loads what goes with the change, before it comes to the
component, whose own methods refuse.  So the pipeline refuses first.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from enginecast.errors import UsageError
from enginecast.pipelines.engine_component import FUSED, is_engine

ENCODER = "text_encoder"
_LORA = (
    *("load_lora_weights", "set_adapters", "fuse_lora", "unfuse_lora", "enable_lora"),
    *("disable_lora", "delete_adapters", "set_lora_device", "enable_lora_hotswap"),
)
_IMAGES = ("load_ip_adapter",)
_TEXTS = ("load_textual_inversion", "unload_textual_inversion")
_RECORDED = (
    "Load it into the eager pipeline, record a call (enginecast.record), and export {0} again."
)
_DENOISERS = ("unet", "transformer", "transformer_2", "prior", "decoder")


_MARK = "_of_enginecast"


def guard(pipe: Any) -> None:
    """Have a pipeline with engines refuse what would change their weights."""
    for names, changed, hint in (
        (_LORA, _denoiser, FUSED),
        (_IMAGES, _denoiser, _RECORDED),
        (_TEXTS, _encoder, FUSED),
    ):
        for name in names:
            plain = getattr(type(pipe), name, None)
            if callable(plain) and name not in vars(pipe):
                method = wraps(plain)(partial(_checked, pipe, plain, changed, hint))
                setattr(method, _MARK, True)
                setattr(pipe, name, method)


def unguard(pipe: Any) -> None:
    """Give a pipeline without engines its own methods back."""
    if any(is_engine(each) for each in pipe.components.values()):
        return
    for name in (*_LORA, *_IMAGES, *_TEXTS):
        if hasattr(vars(pipe).get(name), _MARK):
            delattr(pipe, name)


def _checked(
    pipe: Any,
    plain: Callable[..., Any],
    changed: Callable[[Any, dict[str, Any]], str | None],
    hint: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if (name := changed(pipe, kwargs)) is not None:
        raise UsageError(
            f"{name} is an engine, whose weights are fixed: no {plain.__name__}",
            hint=hint.format(name),
        )
    return plain(pipe, *args, **kwargs)


def _denoiser(pipe: Any, given: dict[str, Any]) -> str | None:
    """The denoiser, where it is an engine; a text encoder refuses for itself, if it is changed."""
    loadable = getattr(type(pipe), "_lora_loadable_modules", ())
    names = (*_DENOISERS, *(name for name in loadable if not name.startswith(ENCODER)))
    components = pipe.components
    return next((name for name in names if is_engine(components.get(name))), None)


def _encoder(pipe: Any, given: dict[str, Any]) -> str | None:
    """The text encoder that is changed, where it is an engine."""
    asked = given.get(ENCODER)
    for name, each in pipe.components.items():
        is_asked = each is asked if asked is not None else name == ENCODER
        if is_asked and is_engine(each):
            return str(name)
    return None
