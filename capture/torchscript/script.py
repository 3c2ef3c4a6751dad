"""Script the smallest submodules that contain a data-dependent branch; trace the rest.

A trace bakes every branch that it takes, and says nothing of most of them; a script holds both
paths, and refuses much of Python.  So the two are mixed, and what comes out is never trusted before
it was compared with eager.  All that captures with TorchScript is in this file, since PyTorch has
deprecated it.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import frontend

from enginecast.capture.outputs.flatten import ALL, Wanted, run_named
from enginecast.capture.python.locations import (
    FRAME,
    SourceLocation,
    holds,
    is_model_code,
    noting_calls,
    origin_of,
    real_path,
)
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.python.recompile import replaced
from enginecast.capture.sources.factory import copy_sharing_weights
from enginecast.capture.sources.weights.widened import WidenedWeight
from enginecast.errors import CaptureError, EnginecastError, MissingError
from enginecast.library_names import tested

DEPRECATION = "TorchScript is deprecated by PyTorch since 2.11"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WRAPPER = "_script_if_tracing.<locals>.wrapper"
"""What `torch.jit.script_if_tracing` puts around a function."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Have no forward, so that there is nothing to script."""


@dataclass(frozen=True)
class Suspect:
    """A line that the tracer warned of: what it read there may be baked."""

    place: SourceLocation
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass(frozen=True)
class Hybrid:
    """A model as TorchScript: scripted where it branches, traced elsewhere."""

    module: torch.jit.ScriptModule
    """Takes the inputs in order, without names; returns a tuple of the outputs in order.  Inputs
    are as the model is fed; float ones are cast to the model's dtype inside."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scripted: tuple[str, ...]
    """Paths of the submodules that are scripted; "" is the whole model."""
    suspects: tuple[Suspect, ...]
    held: tuple[SourceLocation, ...]
    """Places that a scripted submodule holds."""
    unscripted: tuple[SourceLocation, ...]
    """Places that no scripted submodule holds and that the tracer warned of: what is decided there
    is baked."""
    notes: tuple[str, ...]


class UnscriptableError(CaptureError):
    """Nothing that holds a branch can be scripted."""


def require_torchscript() -> None:
    """Refuse a torch that has dropped TorchScript.

    Raises:
        MissingError: names what is missing.
    """
    names = ("script", "trace", "save", "load")
    missing = [name for name in names if not callable(getattr(torch.jit, name, None))]
    if missing:
        raise MissingError(
            f"torch {torch.__version__} has no torch.jit.{missing[0]}: PyTorch has dropped"
            " TorchScript",
            hint=f"{tested('torch')} Or avoid TorchScript: --fallback specialise.",
        )


def hybrid(
    module: nn.Module,
    example: Mapping[str, Tensor],
    places: Collection[SourceLocation] = (),
    *,
    wanted: Wanted = ALL,
    dtype: torch.dtype = torch.float32,
    optional: Collection[SourceLocation] = (),
) -> Hybrid:
    """Script what holds the places, trace the rest; on a copy of the module.

    Args:
        module: in eval mode, its floats in `dtype`.
        example: inputs by name, in the order that the result takes them; sizes of two or more.
        places: file and line of the branches that depend on data; each must end up in a script.
            Without any, everything is traced.
        wanted: the outputs that are kept.
        dtype: that float inputs are cast to.
        optional: places that are scripted where they can be, and else traced and named in
            `unscripted`.

    Raises:
        UnscriptableError: nothing that holds one of the places can be scripted; names module, line
            and TorchScript's reason.
        CaptureError: the trace failed.
        MissingError: this torch has no TorchScript any more.
    """
    require_torchscript()
    own = copy_sharing_weights(module).eval().requires_grad_(False)
    widened: dict[int, nn.Parameter] = {}
    for owner in own.modules():  # weights that are widened as they are read become fp32 ones
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if isinstance(tensor, WidenedWeight):
                    stored = tensor.stored
                    made = widened.get(id(stored)) or nn.Parameter(stored.float(), False)
                    tensors[name] = widened[id(stored)] = made
    outer = Positional(own, tuple(example), wanted, dtype)
    arguments = tuple(example.values())
    # What TorchScript warns of is held back: its deprecation is one note of ours.
    with warnings.catch_warnings(record=True) as caught, torch.no_grad(), quiet_torch():
        warnings.simplefilter("always")
        # An engine must give the same for the same inputs: refuse a model that keeps something.
        before = {name: tensor.clone() for name, tensor in own.named_buffers()}
        outer(*arguments)
        for name, tensor in own.named_buffers():
            old = before.get(name)
            if old is None or old.shape != tensor.shape or not torch.equal(old, tensor):
                raise CaptureError(
                    f"forward writes into the buffer {name}, and an engine cannot keep it",
                    hint="Return the new value instead, or switch the update off in eval mode.",
                )
        scripting = _Scripting(outer, arguments)
        missed = scripting.script_all(places, optional)
        caught.clear()  # what is scripted warns of nothing; only the trace is of interest
        try:
            traced = torch.jit.trace(outer, arguments, check_trace=False, strict=False)
        except EnginecastError:
            raise
        except Exception as error:  # the tracer raises many kinds, and the model's own code any
            raise CaptureError(
                f"torch.jit.trace refused the model: {_reason(error)}",
                hint="Return tensors in tuples, dicts or dataclasses, and read no values of tensors"
                " in forward.",
            ) from error
    suspects: dict[Suspect, None] = {}
    for warning in caught:
        if warning.category.__name__ == "TracerWarning":
            said = str(warning.message).strip().split(". ")[0].split("\n")[0]
            suspects[Suspect(SourceLocation(warning.filename, warning.lineno), said)] = None
    scripted = tuple(sorted(scripting.done))
    # What eager reads and a trace does not is not baked: transformers' masks, for one.
    warned = {suspect.place.resolved for suspect in suspects}
    baked = {place: reason for place, reason in missed.items() if place.resolved in warned}
    how = "all of the model is traced"
    if scripted:
        how = f"scripted {', '.join(path or 'the whole model' for path in scripted)}; the rest is"
        how += " traced"
    elif any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        how = "TorchScript modules in the model stay as they are; the rest is traced"
    return Hybrid(
        traced,
        outer.inputs,
        outer.outputs,
        scripted,
        tuple(suspects),
        held=tuple(place for place in dict.fromkeys((*places, *optional)) if place not in missed),
        unscripted=tuple(baked),
        notes=(
            f"TorchScript: {how}",
            *(
                f"TorchScript: the branch at {place} is traced, not scripted: {reason}"
                for place, reason in baked.items()
            ),
        ),
    )


class Positional(nn.Module):
    """The model as a function of positional tensors that returns a tuple of them."""

    def __init__(
        self, model: nn.Module, inputs: tuple[str, ...], wanted: Wanted, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.wanted = wanted
        self.dtype = dtype
        self.outputs: tuple[str, ...] = ()

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        given = [
            a.to(self.dtype) if a.is_floating_point() and a.dtype != self.dtype else a
            for a in arguments
        ]
        inputs = dict(zip(self.inputs, given, strict=True))
        named = run_named(self.model, inputs, self.wanted, autocasts=True)
        self.outputs = tuple(named)
        return tuple(named.values())


class _Scripting:
    """A model some of whose submodules are scripted already."""

    def __init__(self, outer: Positional, arguments: tuple[Tensor, ...]) -> None:
        self.outer = outer
        self.arguments = arguments
        self.done: list[str] = []
        self.returned = self._results()

    def _results(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """What the model returns: names, dtypes and shapes."""
        found = self.outer(*self.arguments)
        return [(n, t.dtype, t.shape) for n, t in zip(self.outer.outputs, found, strict=True)]

    def script_all(
        self, places: Collection[SourceLocation], optional: Collection[SourceLocation]
    ) -> dict[SourceLocation, str]:
        """Script an owner of every place; return the optional places without one, and why."""
        every = dict.fromkeys((*places, *optional))
        if not every:
            return {}
        model = self.outer.model
        missed: dict[SourceLocation, str] = {}
        compiled = compiled_by_trace(every, lambda: self.outer(*self.arguments))
        left = [place for place in every if place not in compiled]
        if not left:
            return {}
        for place, paths in owners(model, left, lambda: self.outer(*self.arguments)).items():
            for path in paths or ("",):
                reason = self._script(path)
                if reason and place in places:
                    kind = type(model.get_submodule(path)).__name__
                    raise UnscriptableError(
                        f"neither {path or 'the model itself'} ({kind}), which branches on data at"
                        f" {place}, nor a module around it can be scripted: {reason}",
                        hint="Rewrite the branch with torch.where or torch.cond, or move it into a"
                        " small module of plain tensor code.",
                    )
                if reason:
                    missed[place] = reason
        return missed

    def _script(self, path: str) -> str:
        """Script `path`, or the next module around it that TorchScript takes.

        Returns:
            Why the innermost one cannot be scripted, when none can; empty otherwise.
        """
        if any(found in ("", path) or path.startswith(f"{found}.") for found in self.done):
            return ""
        innermost = self._try(path)
        reason = innermost
        while reason and path:
            path = path.rpartition(".")[0]
            reason = self._try(path)
        return innermost if reason else ""

    def _try(self, path: str) -> str:
        """Script the submodule at `path` and run the model with it; return why that fails."""
        before = self.outer.model.get_submodule(path)
        if isinstance(before, _CONTAINERS):
            return "a list of modules has no forward"
        try:
            with refusing_decorators():
                scripted = torch.jit.script(before)
            self._put(before, scripted)
        except Exception as error:  # TorchScript raises RuntimeError, OSError, TypeError, ...
            return _reason(error)
        try:
            found = self._results()
        except Exception as error:  # a script takes no other types than it has declared
            self._put(scripted, before)
            return _reason(error)
        if found != self.returned:  # code may ask torch.jit.is_scripting()
            self._put(scripted, before)
            return f"as a script it returns {_outputs(found)}, otherwise {_outputs(self.returned)}"
        self.done = [found for found in self.done if path and not found.startswith(f"{path}.")]
        self.done.append(path)
        return ""

    def _put(self, old: nn.Module, new: nn.Module) -> None:
        """Replace a module wherever the model uses it."""
        for owner in list(self.outer.modules()):
            if isinstance(owner, torch.jit.ScriptModule):
                continue
            for name, child in list(owner._modules.items()):
                if child is old:
                    owner._modules[name] = new


def _outputs(found: Sequence[tuple[str, torch.dtype, torch.Size]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, _, shape in found) or "nothing"


def _reason(error: BaseException) -> str:
    """TorchScript's own words, as one sentence with the line that it complains of."""
    text = str(error)
    lines = [line.strip().rstrip(":") for line in text.splitlines() if line.strip()]
    # "Arguments for call are not valid", "Unknown type name": the first line says it.
    said = next((line for line in lines if not FRAME.match(line)), type(error).__name__)
    places = [place for place in SourceLocation.in_text(text) if is_model_code(place.file)]
    where = f" ({places[0]})" if places else ""
    # Addresses differ from run to run, and manifests must not.
    return f"{_ADDRESS.sub('', said[:200])}{where}"


PARSE = "parse_def"
"""What TorchScript's frontend reads a function's source with."""


@contextmanager
def refusing_decorators() -> Iterator[None]:
    """Within the block, scripting a function that a user's decorator wraps raises an error.

    TorchScript compiles what a decorator wraps, and leaves the decorator out without a word.

    Raises:
        RuntimeError: as TorchScript raises for what it does not take; names function and line.
    """
    plain: Callable[[Any], Any] = vars(frontend)[PARSE]

    def checked(function: Any) -> Any:
        wrapper = function
        while hasattr(wrapper, "__wrapped__"):
            code = getattr(wrapper, "__code__", None)
            if code is not None and is_model_code(code.co_filename):
                raise RuntimeError(
                    f"TorchScript would leave out the decorator of {wrapper.__qualname__}, which "
                    f"is at {code.co_filename}:{code.co_firstlineno}"
                )
            wrapper = wrapper.__wrapped__
        return plain(function)

    with replaced(frontend, PARSE, checked):
        yield


def compiled_by_trace(
    places: Collection[SourceLocation], run: Callable[[], object]
) -> frozenset[SourceLocation]:
    """The places that a trace scripts by itself: they stand in functions which
    `torch.jit.script_if_tracing` decorates, or in those that these call.

    Runs the model once.  A place that is also come to on another way is not among them.
    """
    inside: set[SourceLocation] = set()
    outside: set[SourceLocation] = set()

    def note(place: SourceLocation, at: FrameType) -> None:
        frame: FrameType | None = at
        while frame is not None and frame.f_code.co_qualname != _WRAPPER:
            frame = frame.f_back
        compiled = frame is not None and origin_of(frame.f_code.co_filename) == "torch"
        (inside if compiled else outside).add(place)

    _note_functions(places, run, note)
    return frozenset(inside - outside)


def _note_functions(
    places: Collection[SourceLocation],
    run: Callable[[], object],
    note: Callable[[SourceLocation, FrameType], object],
) -> None:
    """Run the model once, and call `note` when a function with a place begins."""
    wanted = {place: place.resolved for place in places}
    files = {resolved.file for resolved in wanted.values()}

    def entered(frame: FrameType) -> None:
        file = real_path(frame.f_code.co_filename)
        for place, resolved in wanted.items() if file in files else ():
            if resolved.file == file and holds(frame.f_code, resolved.line):
                note(place, frame)

    with noting_calls(entered):
        run()


def owners(
    module: nn.Module, places: Collection[SourceLocation], run: Callable[[], object]
) -> dict[SourceLocation, tuple[str, ...]]:
    """Run the model once and note whose forward was running when a function with a place began.

    Returns:
        For each place the paths of the innermost modules, sorted; where the run came by none, the
        modules whose forward stands around the line; empty where there is none either.
    """
    paths = {id(found): path for path, found in module.named_modules()}
    found: dict[SourceLocation, set[str]] = {place: set() for place in places}
    _note_functions(places, run, lambda place, frame: found[place].update(_innermost(frame, paths)))
    return {place: tuple(sorted(met or _around(module, place))) for place, met in found.items()}


def _innermost(frame: FrameType | None, paths: Mapping[int, str]) -> set[str]:
    """The path of the module whose forward this frame is, or was called from."""
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None and frame.f_code in _codes(type(frame.f_locals["self"])):
            return {path}
        frame = frame.f_back
    return set()


def _codes(module_class: type[nn.Module]) -> Iterator[CodeType]:
    """The code of a class's forward, and of what its decorators wrap."""
    function: Any = getattr(module_class, "forward", None)  # what is scripted has none
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None:
            yield code
        function = getattr(function, "__wrapped__", None)


def _around(module: nn.Module, place: SourceLocation) -> set[str]:
    """Modules whose forward holds a line that the run did not come by."""
    file, line = place.resolved
    return {
        path
        for path, found in module.named_modules()
        for code in _codes(type(found))
        if real_path(code.co_filename) == file and holds(code, line)
    }
