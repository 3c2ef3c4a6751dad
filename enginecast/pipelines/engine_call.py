"""A call of a component, as tensors by name for the engine that stands for it, and back."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from enginecast.capture.inputs.calls import leaves_of
from enginecast.capture.inputs.derive.diffusion import one_by_one
from enginecast.capture.outputs.flatten import ASK, HIDDEN_STATES
from enginecast.capture.sources.calls.recording import (
    MASKS,
    PACKING,
    SHAPES,
    alike_rows,
    by_name,
)
from enginecast.errors import InputError
from enginecast.pipelines.returned import Returned, tensor_of
from enginecast.runtime.bundle.manifest import Call, Input, Manifest
from enginecast.runtime.engine import Engine

STEP = "timestep"
"""An input that pipelines give as one number for all rows."""
WIDTHS = ("channels", "_dim", "hidden_size")
"""What fields of a config that hold numbers of channels end with."""
WITHOUT = "Record a call without it, and export {0} again."
AGAIN = "Record a call that has it (enginecast.record), and export {0} again."
_FUSED = "Engines hold their weights as they are: call pipe.fuse_lora() and export {0} again."
_IMAGES = "Load the IP-Adapter, record a call, and export {0} again."
_CONTROLLED = "Record a call of the pipeline with its ControlNet, and export {0} again."
_HINTS = {
    "attention_kwargs.ip_adapter": _IMAGES,
    "image_embeds": _IMAGES,
    "attention_kwargs": _FUSED,
    "residual": _CONTROLLED,
    "controlnet": _CONTROLLED,
}
"""What to do about an argument, by part of its name."""


@dataclass(frozen=True)
class EngineCall:
    """A method of a component that an engine stands for.

    Args:
        owner: name of the component, for errors.
        method: of the component's class.
    """

    owner: str
    method: Any
    call: Call
    manifest: Manifest
    returned: Returned

    def __call__(
        self,
        module: nn.Module,
        engine: Engine,
        device: str,
        like: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run the engine; once for each image, where it takes one.

        Args:
            device: where the engine runs.
            like: outputs get its device, and floats its dtype.

        Raises:
            InputError: the engine was made without an argument, or takes no such sizes or dtypes.
        """
        given = by_name(self.method, module, tuple(args), dict(kwargs))
        packing = [given.pop(name, None) for name in PACKING]
        asked = given.pop(ASK, None)
        hidden = bool(_setting(module, ASK) if asked is None else asked)
        if hidden and HIDDEN_STATES not in self.returned.names:
            raise InputError(
                f"{self.owner}: {ASK} is True, and the engine gives no hidden states",
                hint=f"Record a call that asks for them, or export {self.owner} again with"
                " --hidden-state INDEX.",
            )
        paths = [path for path in self.call.constants if path.startswith(f"{SHAPES}.")]
        if paths and (rows := alike_rows(given).get(SHAPES)):
            given[SHAPES] = rows * len({path.split(".")[1] for path in paths})
        outputs: dict[str, Tensor] = {}
        alone = not any(path.endswith(".1") for path in self.call.inputs)
        images = one_by_one(self.call.model_class, given, others=alone)
        for number, each in enumerate(images):
            feeds = self._feeds(module, leaves_of(each), device)
            try:
                found = engine.run(feeds, as_dlpack=True)
            except InputError as error:
                hint = self._wider(module, feeds) or error.hint
                raise InputError(f"{self.owner}: {error.message}", hint=hint) from error
            for spec in self.manifest.outputs:
                tensor = tensor_of(found[spec.name], spec.dtype).to(like.device)
                tensor = tensor.to(like.dtype) if tensor.is_floating_point() else tensor
                name = f"{spec.name.rpartition('.')[0]}.{number}" if number else spec.name
                outputs[name] = tensor
        config, layers = getattr(module, "config", None), None
        if isinstance(config, PreTrainedConfig):
            layers = getattr(config.get_text_config(), "num_hidden_layers", None)
        return self.returned.packed(
            outputs,
            as_dict=packing[0] is not False and _setting(module, "return_dict") is not False,
            hidden=hidden,
            count=layers + 1 if isinstance(layers, int) else None,
        )

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.method).parameters.values()
        return {each.name: each.default for each in parameters if each.default is not each.empty}

    def _feeds(
        self, module: nn.Module, leaves: Mapping[str, Any], device: str
    ) -> dict[str, Tensor]:
        call, defaults = self.call, self._defaults
        for path, value in leaves.items():
            if path in call.inputs or self._is_default(module, path, value):
                continue
            said = "a tensor" if isinstance(value, Tensor) else repr(value)
            if path not in call.constants:
                self._refuse(path, f"{said}, and the engine was made without it")
            if isinstance(value, Tensor) or value != call.constants[path]:
                self._refuse(path, f"{said}, and {call.constants[path]!r} in the engine")
        for path, value in call.constants.items():
            known = path == ASK or path in leaves
            if not known and not self._is_default(module, path, value):
                self._refuse(path, f"not given, and {value!r} in the engine")
        values = {name: leaves.get(path, defaults.get(path)) for path, name in call.inputs.items()}
        for mask, masked in MASKS.items():
            of = values.get(masked)
            if call.inputs.get(mask) and values[mask] is None and isinstance(of, Tensor):
                values[mask] = torch.ones(of.shape[:2], dtype=torch.int64)  # what None means
        for path, name in call.inputs.items():
            value = values[name]
            if value is None:
                self._refuse(path, "not given, and an input of the engine", WITHOUT)
            if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
                raise InputError(
                    f"{self.owner}: {path} requires a gradient, and an engine computes none",
                    hint="Call it within torch.no_grad(); `put_back()` of what attach returned"
                    " gives the component that has a gradient.",
                )
        specs = {spec.name: spec for spec in self.manifest.inputs}
        step, rows = specs.get(STEP), None
        if step is not None and len(step.shape) == 1:  # of the first input that has as many
            rows = next(
                (
                    int(values[name].shape[0])
                    for name, spec in specs.items()
                    if name != STEP
                    and spec.shape[:1] == step.shape
                    and isinstance(values[name], Tensor)
                ),
                None,
            )
        return {name: self._fed(specs[name], value, rows, device) for name, value in values.items()}

    def _is_default(self, module: nn.Module, path: str, value: Any) -> bool:
        """Whether an argument has the value that it has where it is not given."""
        default = self._defaults.get(path)
        if default is None:  # flags of transformers: None is what the config says
            default = _setting(module, path) or False
        is_flag = isinstance(value, bool) == isinstance(default, bool)
        return not isinstance(value, Tensor) and is_flag and bool(value == default)

    def _refuse(self, path: str, why: str, hint: str = "") -> None:
        hint = hint or next((hint for part, hint in _HINTS.items() if part in path), AGAIN)
        raise InputError(f"{self.owner}: {path} is {why}", hint=hint.format(self.owner))

    def _fed(self, spec: Input, value: Any, rows: int | None, device: str) -> Tensor:
        """A value as the engine takes it; nothing is rounded."""
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        wanted = getattr(torch, spec.dtype)
        widens = tensor.dtype in (torch.bool, wanted) or (
            tensor.dtype.is_floating_point == wanted.is_floating_point
            and torch.promote_types(tensor.dtype, wanted) == wanted
        )  # whether every value of a dtype is one of the other
        if not widens:
            small = tensor.ndim <= 1 or not tensor.is_floating_point()
            if not small or not torch.equal(tensor.to(wanted).to(tensor.dtype), tensor):
                self._refuse_dtype(spec, tensor)
        tensor = tensor.to(device, wanted)
        is_one = tensor.ndim == 0 or tensor.shape == (1,)
        if spec.name == STEP and len(spec.shape) == 1 and is_one and rows:
            tensor = tensor.expand(rows)
        return tensor.contiguous()

    def _refuse_dtype(self, spec: Input, tensor: Tensor) -> None:
        said = str(tensor.dtype).removeprefix("torch.")
        if tensor.ndim <= 1 and tensor.is_floating_point() and spec.dtype.startswith("int"):
            flat = tensor.flatten()
            odd = flat[flat.to(getattr(torch, spec.dtype)).to(flat.dtype) != flat][0].item()
            raise InputError(
                f"{self.owner}: {spec.name} is {odd!r}, and the engine takes {spec.dtype}",
                hint="Record a call of the pipeline with this scheduler (enginecast.record), and"
                f" export {self.owner} again: its {spec.name} is a float then.",
            )
        raise InputError(
            f"{self.owner}: {spec.name} is {said}, and the engine takes {spec.dtype}, which cannot"
            " hold all of its values",
            hint=f"Run the pipeline in {spec.dtype}: pipe.to(torch.{spec.dtype})."
            if tensor.is_floating_point() and spec.dtype.startswith(("float", "bfloat"))
            else "",
        )

    def _wider(self, module: nn.Module, feeds: Mapping[str, Tensor]) -> str:
        """How to export for sizes that the engine does not take; empty: no export takes them."""
        symbols, config = self.manifest.symbols, getattr(module, "config", None)
        fields = config.to_dict() if isinstance(config, PreTrainedConfig) else dict(config or {})
        # How many channels the weights take: sizes that are the same in every call.
        widths = {n for name, n in fields.items() if name.endswith(WIDTHS) and isinstance(n, int)}
        for spec in self.manifest.inputs:
            sizes = feeds[spec.name].shape
            for axis, (declared, size) in enumerate(zip(spec.shape, sizes, strict=False)):
                fixed = (declared, declared) if isinstance(declared, int) else None
                least, most = fixed or symbols[str(declared)]
                if axis and declared in widths and spec.shape.count(declared) == 1:
                    continue
                if not least <= size <= most:
                    asked = f"{spec.name}:{axis}={min(least, size)}..{max(most, size)}"
                    return (
                        f"Export {self.owner} again for more: --dynamic {asked}, or record calls of"
                        " all sizes (enginecast.record)."
                    )
        return ""


def _setting(module: nn.Module, name: str) -> Any:
    """What a model of transformers takes where an argument is not given."""
    config = getattr(module, "config", None)
    return getattr(config, name, None) if isinstance(config, PreTrainedConfig) else None
