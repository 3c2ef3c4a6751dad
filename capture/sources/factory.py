"""`package.module:factory`: a user's function that returns a module, or (module, example)."""

import hashlib
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from transformers import PreTrainedConfig, PreTrainedModel

from enginecast.capture.inputs.calls import call_of, take_named_tensors
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.calls.recording import Recorded
from enginecast.capture.sources.huggingface.transformers_folder import write_config
from enginecast.capture.sources.weights.copies import cast_module, copy_module
from enginecast.capture.sources.weights.empty import empty_copy
from enginecast.capture.sources.weights.finite import require_finite_module
from enginecast.errors import SourceError
from enginecast.installation import missing_requirement

QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
HALVES = frozenset({torch.float16, torch.bfloat16})
RETURNS = "A factory takes no argument and returns a torch.nn.Module, or (module, example)."


class FactorySource(Source):
    """A module that the user's own code built."""

    def __init__(self, name: str, module: nn.Module, example: Any) -> None:
        module = as_written(module, name)
        if isinstance(example, Recorded):
            example.require(module)
            call, tensors = example.call, example.example
            self.recorded = example.by_name
            self.notes = example.notes
        else:
            call, tensors = call_of(arguments_of(example, name, module.forward), name)
        self.name = name
        self.call = None if call.is_plain else call
        self.model_class = type(module)
        self.trained = frozenset(name for name, part in module.named_modules() if part.training)
        self._module = module.eval()
        for parameter in module.parameters():
            if parameter.is_leaf:  # the copy of a scripted module has none
                parameter.requires_grad_(False)
        self._example = tensors
        config = getattr(module, "config", None)
        self.config = config if isinstance(config, PreTrainedConfig) else None

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        require_finite_module(self._module, self.name)
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights().items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        return {"factory": self.name, "weights": digest.hexdigest()}

    def write_beside(self, folder: Path) -> None:
        super().write_beside(folder)
        if config := config_of(self._module):
            write_config(config, folder)

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A copy of the factory's module with floats in `dtype`; weights in `dtype` are shared.

        In fp16, what transformers keeps in fp32 when it loads a model stays so.
        """
        module = copy_sharing_weights(self._module)
        kept = kept_in_fp32(module) if dtype == torch.float16 else {}
        if not self.keeps_dtypes:
            cast_module(module, dtype)
        for parameter, tensor in kept.items():
            parameter.data = tensor.to(torch.float32)
        return take_named_tensors(self._with_own_inputs(module), self.call)

    def empty(self) -> nn.Module:
        module = empty_copy(self._module, casts=not self.keeps_dtypes)
        return take_named_tensors(self._with_own_inputs(module), self.call)

    def _with_own_inputs(self, module: nn.Module) -> nn.Module:
        """A module that keeps its dtypes gets inputs in those of its example."""
        dtypes = {name: t.dtype for name, t in self._example.items() if t.is_floating_point()}

        def cast(_: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            others = {n: named[n].to(d) for n, d in dtypes.items() if named[n].dtype != d}
            return args, {**named, **others}

        if dtypes and self.keeps_dtypes and self.call is None:
            module.register_forward_pre_hook(cast, with_kwargs=True)
        return module

    @cached_property
    def keeps_dtypes(self) -> bool:
        """Whether its code casts values to what its weights are in: a model wholly in fp64 that
        takes inputs in fp32, or one with weights in 16 bits that does not run in fp32.
        """
        floats, given = (
            {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
            for tensors in (self.weights(), self._example)
        )
        if floats == {torch.float64} and given and torch.float64 not in given:
            return self._runs()
        if not floats & HALVES or (len(floats) == 1 and given <= floats):
            return False
        return not self._runs(torch.float32) and self._runs()

    def _runs(self, dtype: torch.dtype | None = None) -> bool:
        """Whether the module takes its example, in its own dtypes or cast to one."""
        module, given = copy_sharing_weights(self._module), self.example()
        if dtype is not None:
            cast_module(module, dtype)
            given = {n: t.to(dtype) if t.dtype in HALVES else t for n, t in given.items()}
        try:
            with torch.no_grad():
                take_named_tensors(module, self.call)(**given)
        except Exception:  # the model's own code
            return False
        return True

    def weights(self) -> dict[str, Tensor]:
        return dict(self._module.state_dict())

    @property
    def forward_signature(self) -> inspect.Signature:
        plain = inspect.signature(self._module.forward)
        return plain if self.call is None else self.call.signature

    def example(self) -> dict[str, Tensor]:
        return dict(self._example)


def config_of(module: nn.Module) -> dict[str, Any]:
    """The config that diffusers or transformers saves for a module; empty for other modules."""
    config = getattr(module, "config", None)
    if isinstance(config, PreTrainedConfig):
        known = json.loads(config.to_json_string(use_diff=False))
        return {**known, "architectures": [type(module).__name__]}
    text = getattr(module, "to_json_string", None)
    return json.loads(text()) if callable(text) else {}


def as_written(module: nn.Module, name: str) -> nn.Module:
    """The module that torch.compile wraps, or the module itself.

    Raises:
        SourceError: it has no Python code, or parameters without a shape or values.
    """
    original = getattr(module, "_orig_mod", None)
    if type(module).__name__ == "OptimizedModule" and isinstance(original, nn.Module):
        return original  # else every size that is run is compiled first
    if isinstance(module, torch.jit.ScriptModule):
        raise SourceError(
            f"{name} is a TorchScript module, which torch.export does not take",
            hint="Give the nn.Module that it was made from; or save it with torch.jit.save and give"
            " the file, with allow_code=True in ModelOptions (--allow-code).",
        )
    named = (*module.named_parameters(), *module.named_buffers())
    waiting = [path for path, tensor in named if is_lazy(tensor)]
    stored = module.state_dict().items()
    odd = [path for path, held in stored if not isinstance(held, Tensor) or not is_dense(held)]
    if odd:
        raise SourceError(
            f"{name}: {odd[0]} is sparse or quantized, which engines do not hold",
            hint="Store dense tensors of floats and integers; --precision int8 quantizes.",
        )
    if waiting:
        raise SourceError(
            f"{name}: the parameter {waiting[0]} has no shape yet: it is one of a lazy module",
            hint="Call the module once on an example before it is returned.",
        )
    if empty := [path for path, tensor in named if tensor.is_meta]:
        raise SourceError(
            f"{name}: weights are on the meta device, expected loaded weights, got {empty[0]}"
            " without values",
            hint="Build the module on the CPU, or load a checkpoint into it with assign=True.",
        )
    return module


def is_dense(value: object) -> bool:
    """False for a tensor that is sparse, nested or quantized; true for anything else."""
    if not isinstance(value, Tensor):
        return True
    return value.layout is torch.strided and not value.is_nested and value.dtype not in QUANTIZED


def copy_sharing_weights(module: nn.Module) -> nn.Module:
    """A copy whose parameters are its own, over the same storage: `.to` replaces data in place."""
    memo: dict[int, Any] = {}
    for tensor in module.parameters():
        memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
    return copy_module(module, memo)


def take_module(module: nn.Module, example: Any) -> FactorySource:
    """A copy of a module: the caller's keeps its mode and its gradients.

    Args:
        example: recorded calls, or what `arguments_of` takes.

    Raises:
        SourceError: see `as_written`, `arguments_of` and `call_of`.
    """
    name = type(module).__name__
    return FactorySource(name, copy_sharing_weights(as_written(module, name)), example)


def open_factory(text: str) -> FactorySource:
    """Import and call `package.module:factory`; the current folder is on the import path.

    Raises:
        SourceError: the import, the attribute or the call failed, or it returned something else.
        MissingError: it wants a GPU or a package that is not here.
    """
    factory = _find(text)
    with _users_code(text, f"{text} raised", hint=RETURNS):
        made = factory()
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not isinstance(module, nn.Module):
        raise SourceError(f"{text} returned {_kind(made)}, expected a module", hint=RETURNS)
    return FactorySource(text, module, example)


def arguments_of(example: object, name: str, forward: Callable[..., Any]) -> Mapping[str, Any]:
    """The arguments of an example by name, in the order of `forward`.

    Args:
        example: arguments by name; a tuple or list of them by position; or one tensor, which is the
            first; None: none.
        name: of the model.
        forward: what takes them.

    Raises:
        SourceError: it is something else, or `forward` does not take them.
    """
    if isinstance(example, Tensor):
        example = (example,)
    elif example is None:
        example = {}
    parameters = inspect.signature(forward).parameters
    if isinstance(example, Mapping) and all(isinstance(key, str) for key in example):
        order = [each for each in parameters if each in example]
        return {each: example[each] for each in dict.fromkeys((*order, *example))}
    if not isinstance(example, (tuple, list)):
        raise SourceError(
            f"{name}: the example is {_kind(example)}, expected a tensor, a tuple or list of the"
            " arguments, or a dict of them by name",
            hint=RETURNS,
        )
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters.values() if each.kind in positional]
    if len(example) > len(names):
        raise SourceError(
            f"{name}: the example has {len(example)} arguments, and forward takes {len(names)} by"
            f" position{': ' if names else ''}{', '.join(names)}",
            hint="A forward with *args needs a module around it that names them."
            if any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
            else "A list that is one argument stands in a tuple: ([a, b],).",
        )
    return dict(zip(names, example, strict=False))


def _find(text: str) -> Callable[[], Any]:
    module_name, _, attribute = text.partition(":")
    who = f"importing {module_name!r}"
    with _users_code(who, f"{text}: {who} failed:", module_name):
        module = importlib.import_module(module_name)
    factory = getattr(module, attribute, None)
    if factory is None:
        raise SourceError(f"{text}: {module_name} has no attribute {attribute!r}")
    if not callable(factory):
        raise SourceError(f"{text}: {attribute} is {_kind(factory)}, expected a function")
    function: Callable[[], Any] = factory
    return function


@contextmanager
def _users_code(who: str, failed: str, module: str = "", hint: str = "") -> Iterator[None]:
    """With the current folder on the import path; it may raise anything, which is explained."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    except (Exception, SystemExit) as error:
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        is_own = name is not None and f"{module}.".startswith(f"{name}.")
        missing = None if is_own else missing_requirement(error, who)
        failure = SourceError(f"{failed} {type(error).__name__}: {error}", hint=hint)
        raise missing or failure from error
    finally:
        sys.path.remove(folder)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def kept_in_fp32(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Each parameter that transformers leaves in fp32 in an fp16 model, with its present values.

    A model class names them in `_keep_in_fp32_modules`: `wo` for T5, whose output outgrows fp16.
    `from_pretrained(dtype=float16)` heeds the list and `.half()` does not, so a module made by a
    factory is worse in fp16 than the same weights loaded from a folder
    (huggingface/diffusers#8604).
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
