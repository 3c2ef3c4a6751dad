"""A component whose methods run engines: an object of its class, without weights."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.errors import InputError, UsageError
from enginecast.pipelines.components import without_weights
from enginecast.pipelines.engine_call import EngineCall
from enginecast.pipelines.returned import Returned
from enginecast.pipelines.tiles import PARTS, Cut, is_cut, works_by_tiles
from enginecast.pipelines.unchanged import Snapshot
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import backends, load

FIXED = "Change the component before it is exported; `put_back()` of what attach returned gives it."
FUSED = "Change the eager pipeline, fuse its adapters, save it, and export {0} again."
REFUSED = (
    *("resize_token_embeddings", "resize_position_embeddings", "enable_freeu"),
    *("enable_cache", "enable_layerwise_casting", "enable_group_offload", "enable_parallelism"),
    *("fuse_qkv_projections", "set_attention_backend", "compile_repeated_blocks", "dequantize"),
    *("save_pretrained", "state_dict", "load_state_dict"),
)
"""Methods that change or read what an engine has fixed: their effect would be lost."""
ADAPTERS = ("diffusers.loaders.", "transformers.integrations.peft")
"""Modules with the classes whose methods load adapters, switch them, and save them."""
OF_ADAPTERS = ("_load_ip_adapter_weights", "_convert_ip_adapter_image_proj_to_diffusers")
"""Those of their own methods that pipelines call."""
COPYING = ("__deepcopy__", "__reduce_ex__")
"""What `copy.deepcopy` and pickles call: a copy would act on the component it was copied from."""
OTHERWISE = ("PAG", "IPAdapter", "Custom")
"""In names of the attention processors of diffusers that compute something else than attention."""
TWO_WAYS = ("encode", "decode")
ENGINES, PLACE = "_engines", "_engine_place"


@dataclass(frozen=True)
class LoadOptions:
    """As `load` has them."""

    prefer: tuple[str, ...] | None
    allow_code: bool
    threads: int | None


class Slot:
    """The engine of a method.  It is loaded for the device that it is used on."""

    def __init__(self, bundle: Bundle, call: EngineCall, options: LoadOptions) -> None:
        self._bundle, self._call, self._options = bundle, call, options
        self._device = self._runs_on = ""
        self._engine: Engine | None = None
        self._processors: dict[str, tuple[Any, object]] = {}
        self._snapshot: Snapshot

    def move(self, device: str) -> None:
        """Free the engine where it was loaded for another device."""
        if device != self._device and self._options.prefer is None:
            self.close()

    def close(self) -> None:
        """Free the engine; a call loads it again."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def load(self, device: str) -> Engine:
        """Load the engine for a device, once."""
        if self._engine is None:
            given = self._options
            self._engine = load(
                self._bundle.root,
                prefer=given.prefer,
                device=device if given.prefer is None else None,
                allow_code=given.allow_code,
                threads=given.threads,
                check="size",  # its digests were compared when the bundle was opened
            )
            self._device = device
            self._runs_on = backends()[self._engine.backend].device
        return self._engine

    def watch(self, module: nn.Module, snapshot: Snapshot) -> None:
        """Remember the attention processors, which pipelines exchange to compute otherwise, and
        what else decides what the component computes.
        """
        self._snapshot = snapshot
        for path, part in module.named_modules():
            if callable(getattr(part, "set_processor", None)) and hasattr(part, "processor"):
                self._processors[path] = part, part.processor

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the method."""
        owner = self._call.owner
        for path, (part, processor) in self._processors.items():
            if part.processor is not processor and _is_otherwise(part.processor):
                raise InputError(
                    f"{owner}: {path} has got a {type(part.processor).__name__}, and the engine"
                    " computes attention as it was exported",
                    hint="`put_back()` of what attach returned gives the component that takes it.",
                )
        if changed := self._snapshot.changed():
            raise InputError(
                f"{owner}: {changed} when its engine was attached, and the engine is as it was",
                hint=f"Undo that; or `put_back()`, change the component, and export {owner} again.",
            )
        place = module.get_parameter(PLACE)
        engine = self.load(place.device.type)
        return self._call(module, engine, self._runs_on, place, args, kwargs)


def engine_component(
    name: str, component: nn.Module, bundles: Sequence[Bundle], options: LoadOptions
) -> nn.Module:
    """A component like another one, of the same class, whose methods run the engines of bundles.

    Raises:
        UsageError: two bundles are of one method.
        MissingError, BundleError: see `load`.
    """
    plain = type(component)
    slots: dict[str, Slot] = {}
    for bundle in bundles:
        call = bundle.manifest.call
        assert call is not None
        if call.entry in slots:
            raise UsageError(f"{name}: {bundle.root}: there is another engine of {call.entry}")
        returned = Returned.of(name, plain, bundle.manifest)
        made = EngineCall(name, getattr(plain, call.entry), call, bundle.manifest, returned)
        slots[call.entry] = Slot(bundle, made, options)
    first = next(component.parameters(), None)
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    for slot in slots.values():
        slot.load(device.type)
    module = without_weights(component)
    # Its first parameter: its device and dtype are what pipelines take for the component's own.
    dtype = getattr(component, "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
    others = dict(module._parameters)
    module._parameters.clear()
    place = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    module.register_parameter(PLACE, place)
    module._parameters.update(others)
    own: Any = vars(module)
    for left in ("_diffusers_hook", "forward"):
        own.pop(left, None)
    own.update(
        _methods(name, module, slots), **{ENGINES: slots, "_apply": _applying(module, slots)}
    )
    own.update(dict.fromkeys(COPYING, partial(_refuse_copy, name)))
    for path, part in module.named_modules():
        if part is not module:
            part.register_forward_pre_hook(partial(_refuse_part, name, path))
    snapshot = Snapshot(module)
    for slot in slots.values():
        slot.watch(module, snapshot)
    return module


def is_engine(component: object) -> bool:
    """Whether a component of a pipeline runs engines."""
    return ENGINES in getattr(component, "__dict__", {})


def close_engines(component: object) -> None:
    """Free the engines of a component that another one replaces, if it has any."""
    for slot in getattr(component, ENGINES, {}).values():
        slot.close()


def _applying(module: nn.Module, slots: Mapping[str, Slot]) -> Any:
    """What `.to`, `.half`, `.cuda` and the like do with a module whose parameters have no data."""
    plain: Any = partial(type(module)._apply, module)

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def applied(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return fn(tensor)
            if not tensor.numel():  # the place, on meta: it has no data to lose
                try:
                    return fn(tensor)
                except NotImplementedError:
                    return fn(torch.empty_like(tensor, device="cpu"))
            return torch.empty_like(tensor, dtype=fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        plain(applied, recurse)
        for slot in slots.values():
            slot.move(module.get_parameter(PLACE).device.type)
        return module

    return apply


def _methods(name: str, module: nn.Module, slots: Mapping[str, Slot]) -> dict[str, Any]:
    """Methods of the module itself; its class stays, which pipelines look at."""
    plain, found = type(module), dict[str, Any]()

    def refuse(method: str, hint: str) -> None:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise UsageError(f"{name} is an engine, which has no {method}", hint=hint)

        found[method] = refused

    for method in (*REFUSED, *(() if works_by_tiles(module) else ("enable_tiling",))):
        if callable(getattr(plain, method, None)):
            refuse(method, FIXED)
    for base in plain.__mro__:
        if base.__module__.startswith(ADAPTERS):
            for method, each in vars(base).items():
                public = method in OF_ADAPTERS or not method.startswith("_")
                if public and inspect.isfunction(each):
                    refuse(method, FUSED.format(name))
    if all(callable(getattr(plain, method, None)) for method in TWO_WAYS):
        for method in TWO_WAYS:
            refuse(method, f"Export it (--entry {method}), and attach both.")
    elif "forward" not in slots:
        refuse("forward", "Export it, and attach it too.")
    for entry, slot in slots.items():
        found[entry] = _running(module, slot, getattr(plain, entry))
    return found


def _running(module: nn.Module, slot: Slot, plain: Any) -> Any:
    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        if plain.__name__ in PARTS and is_cut(module):
            return plain(Cut(module, plain.__name__, whole), *args, **kwargs)
        return slot.run(module, args, kwargs)

    def whole(tile: Tensor) -> Any:
        return slot.run(module, (tile,), {})

    method.__signature__ = inspect.signature(plain.__get__(module))  # type: ignore[attr-defined]
    return torch.compiler.disable(method)


def _refuse_copy(name: str, *args: Any) -> None:
    raise UsageError(
        f"{name} is an engine, which cannot be copied or pickled",
        hint="Attach engines to the copy: `put_back()` of what attach returned, and copy then.",
    )


def _refuse_part(name: str, path: str, part: nn.Module, args: Any) -> None:
    raise UsageError(
        f"{name}.{path} was called, and {name} is an engine, whose parts cannot be called alone",
        hint=FIXED,
    )


def require_plain(name: str, component: nn.Module) -> None:
    """Refuse what changes a component besides its weights.

    Raises:
        UsageError: hooks, adapters, tiling or FreeU do, or it is an engine.
    """
    if is_engine(component):
        raise UsageError(
            f"{name} is an engine already", hint="Call `put_back()` of what attach returned first."
        )
    hooked = next((path for path, each in component.named_modules() if _is_hooked(each)), None)
    if hooked is not None:
        raise UsageError(
            f"{name}{hooked and f'.{hooked}'} has hooks, of offloading, a cache or casting",
            hint="Call pipe.remove_all_hooks(), or take the others away; attach; and set offloading"
            " up again.",
        )
    if getattr(component, "peft_config", None):
        raise UsageError(
            f"{name} has adapters loaded, which the engine does not know of",
            hint="Fuse them (pipe.fuse_lora(), pipe.unload_lora_weights()), and export it again.",
        )
    if getattr(component, "use_tiling", False) and not works_by_tiles(component):
        raise UsageError(
            f"{name} works by tiles, and an engine on whole videos",
            hint=f"Call pipe.{name}.disable_tiling() first.",
        )
    if any(getattr(block, "s1", None) is not None for block in getattr(component, "up_blocks", ())):
        raise UsageError(
            f"{name} has FreeU on, and an engine has it or not, as it was exported",
            hint=f"Call pipe.{name}.disable_freeu() first.",
        )


def _is_hooked(part: nn.Module) -> bool:
    """Whether accelerate's or diffusers' hooks stand before the class's own forward."""
    forward = vars(part).get("forward")  # hooks that were removed leave the class's own there
    is_plain = forward is None or getattr(forward, "__func__", None) is type(part).forward
    return hasattr(part, "_hf_hook") or not is_plain


def _is_otherwise(processor: object) -> bool:
    """Whether a processor computes something else than those of diffusers that only are faster."""
    kind = type(processor)
    is_own = kind.__module__.startswith("diffusers.models.")
    return not is_own or any(part in kind.__name__ for part in OTHERWISE)
