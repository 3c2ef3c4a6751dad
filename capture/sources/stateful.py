"""A module that writes to its buffers, which become inputs and outputs.

    before  forward(x): self.n += 1; return x * self.n
    after   forward(x, state_n): n = state_n + 1; return {"output_0": x * n, "next_n": n}

An engine keeps nothing, so its caller feeds what the last call gave.  The buffer of the module
itself stays as it is.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.specs import DimSpec, InputSpec, Origin, captured_dtype
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.base.wrapped import WrappedSource
from enginecast.errors import SourceError, UsageError

INPUTS = "inputs"
STATE = "state"
"""The task of such a source."""
BEFORE, AFTER = "state_", "next_"


class StatefulSource(WrappedSource):
    """A module of another source, whose state comes and goes with each call.

    Args:
        model: the other source.
        buffers: the buffers that its calls write to, by name, with their initial values.
        calls: inputs of calls in turn, and the state that each of them found.
    """

    task = STATE

    def __init__(
        self,
        model: Source,
        buffers: Mapping[str, Tensor],
        calls: Sequence[Mapping[str, Tensor]],
    ) -> None:
        super().__init__(model)
        self.buffers = dict(buffers)
        self.calls = tuple(calls)
        self.recorded = {f"call {n + 1} in turn": dict(call) for n, call in enumerate(self.calls)}

    def without_state(self) -> Source:
        return self._model

    @property
    def output_of(self) -> Mapping[str, str]:
        """The output that it becomes, by the name of the buffer."""
        return {name: AFTER + name.replace(".", "_") for name in self.buffers}

    def inputs(self) -> tuple[InputSpec, ...]:
        """Those of the module, and one of fixed shape for each buffer, in which integers range over
        the values seen in consecutive calls.
        """
        return (*self._model.inputs(), *self.state_inputs())

    def state_inputs(self) -> Iterator[InputSpec]:
        for name, start in self.start.items():
            low = high = None
            is_number = start.is_floating_point() or start.is_complex() or start.dtype is torch.bool
            if not is_number and start.numel():
                values = [start, *(call[name] for call in self.calls)]
                low = min(int(value.min()) for value in values)
                high = max(int(value.max()) for value in values)
            dims = tuple(map(DimSpec.static, start.shape))
            origin: Origin = "known" if low is None else "example"
            dtype = captured_dtype(start)
            yield InputSpec(name, "tensor", dtype, dims, low, high, origin=origin)

    @cached_property
    def input_of(self) -> Mapping[str, str]:
        """The input that holds a buffer, by the name of the buffer."""
        taken = self._model.forward_arguments
        found = {name: BEFORE + name.replace(".", "_") for name in self.buffers}
        for name, chosen in found.items():
            if chosen in taken or list(found.values()).count(chosen) > 1:
                raise SourceError(
                    f"{self.name}: the state of {name} would be the input {chosen!r}, which is"
                    " taken already",
                    hint="Rename the buffer or the argument.",
                )
        return found

    @property
    def start(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The state for the first call, by input."""
        return {self.input_of[name]: tensor for name, tensor in self.buffers.items()}

    @property
    def _fingerprint(self) -> Mapping[str, str]:
        return {**self._model.fingerprint(), "state": INPUTS}

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return self._fed(self._model.eager(dtype))

    def empty(self) -> nn.Module:
        return self._fed(self._model.empty())

    @property
    def forward_signature(self) -> inspect.Signature:
        kind = inspect.Parameter.KEYWORD_ONLY
        own = self._model.forward_signature.parameters.values()
        named = (p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        return inspect.Signature(
            [
                *(p.replace(kind=kind) for p in named),
                *(inspect.Parameter(name, kind) for name in self.input_of.values()),
            ]
        )

    def example(self) -> dict[str, Tensor]:
        found = self._model.example()
        return {**found, **self.start} if found else {}

    def _fed(self, module: nn.Module) -> nn.Module:
        """Make `module` take and return its state by name, in place.

        See `calls.take_named_tensors`.
        """
        plain: Callable[..., Any] = module.forward
        places = {name: _places(module, name) for name in self.buffers}
        names = dict(self.input_of)
        outputs = self.output_of

        def forward(*args: Any, **tensors: Any) -> Any:
            if args or not tensors.keys() >= set(names.values()):
                return plain(*args, **tensors)  # the model's own code calls it
            kept = {name: owned[0][0][owned[0][1]] for name, owned in places.items()}
            try:
                for name, owned in places.items():
                    fed = tensors.pop(names[name]).clone()
                    for owner, key in owned:
                        owner[key] = fed
                returned = plain(**tensors)
                after = {n: owned[0][0][owned[0][1]] for n, owned in places.items()}
            finally:
                for name, owned in places.items():
                    for owner, key in owned:
                        owner[key] = kept[name]
            given = _fields(returned)
            twice = next((name for name, output in outputs.items() if output in given), None)
            if twice is not None:
                raise SourceError(
                    f"{self.name}: the new state of {twice} would be the output"
                    f" {outputs[twice]!r}, which forward returns already",
                    hint="Rename the buffer or what forward returns.",
                )
            return {**given, **{outputs[name]: after[name] for name in after}}

        forward.__signature__ = self.forward_signature  # type: ignore[attr-defined]
        forward.__wrapped__ = plain  # type: ignore[attr-defined]
        module.forward = forward
        return module


def with_state(source: Source, calls: Sequence[Mapping[str, Tensor]]) -> StatefulSource:
    """The module of a source with the buffers that its calls write to as inputs and outputs.

    Args:
        calls: inputs of calls in turn.

    Raises:
        SourceError: the module does not run, or a buffer gets another shape or dtype.
        UsageError: its forward writes to no buffer, or it is a program or of TorchScript.
    """
    if source.given_program() is not None:
        raise UsageError(f"--stateful does not fit {source.name}, which is a program")
    if source.given_script() is not None:
        raise UsageError(
            f"--stateful does not fit {source.name}, which is a TorchScript module",
            hint="Export the module it was made from, or make the state an input and an output.",
        )
    module = source.eager()
    first = {id(tensor): name for name, tensor in module.named_buffers()}
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    every = module.named_buffers(remove_duplicate=False)
    one = {alias: first[id(tensor)] for alias, tensor in every}
    shared = _sharing(module)
    seen: list[dict[str, Tensor]] = []
    written: dict[str, None] = {}
    for inputs in calls:
        found = dict(module.named_buffers(remove_duplicate=False))
        seen.append({name: tensor.clone() for name, tensor in found.items()})
        versions = {name: tensor._version for name, tensor in found.items()}
        try:
            with torch.no_grad(), quiet_torch():
                module(**{name: tensor.clone() for name, tensor in inputs.items()})
        except Exception as error:  # the model's own code
            raise SourceError(
                f"{source.name}: call {len(seen)} in a row failed: {type(error).__name__}: {error}",
                hint="Give inputs that the model accepts in every call: --inputs FILE.safetensors.",
            ) from error
        for name in _written(source.name, module, found, versions, seen[-1], one):
            written[name] = None
    for name in written:
        if before[name].is_complex():
            raise SourceError(
                f"{source.name}: forward writes to the buffer {name} of {before[name].dtype}, and"
                " engines take no complex state",
                hint="Keep torch.view_as_real of it, and use torch.view_as_complex in forward.",
            )
        if name in shared:
            raise SourceError(
                f"{source.name}: forward writes to the buffer {name}, which shares its memory with"
                f" {shared[name]}",
                hint="Keep one of them, and take the other from it in forward.",
            )
    if not written:
        raise UsageError(
            f"--stateful does not fit {source.name}: its forward writes to no buffer",
            hint="Leave it out; or register what forward keeps: self.register_buffer(NAME, ...).",
        )
    started = StatefulSource(source, {name: before[name] for name in written}, ())
    fed = [
        {**inputs, **{started.input_of[name]: kept[name] for name in written}}
        for inputs, kept in zip(calls, seen, strict=True)
    ]
    return StatefulSource(source, started.buffers, fed)


def _written(
    model: str,
    module: nn.Module,
    found: Mapping[str, Tensor],
    versions: Mapping[str, int],
    values: Mapping[str, Tensor],
    one: Mapping[str, str],
) -> Iterator[str]:
    """The buffers that a call wrote to.

    Args:
        found: the buffers before the call, under all their names.
        versions: of these tensors, before the call.
        values: copies of them.
        one: the first name of a buffer, by each name.

    Raises:
        SourceError: a buffer is new, gets another shape or dtype, or parts from one that it was.
    """
    after = dict(module.named_buffers(remove_duplicate=False))
    new = next((name for name in after if name not in one), None)
    if new is not None:
        raise SourceError(
            f"{model}: forward makes the buffer {new}, which was None before",
            hint="Let it start from a value: self.register_buffer(NAME, torch.zeros(...)).",
        )
    for name, tensor in found.items():
        now = after.get(name)
        if after.get(one[name]) is not now:
            raise SourceError(
                f"{model}: {one[name]} and {name} are the same buffer, and forward replaces only"
                " one of them",
                hint="Write into it in place, or keep two buffers from the start.",
            )
        if now is tensor and tensor._version == versions[name]:
            old = values[name]
            if bool(((old == tensor) | ((old != old) & (tensor != tensor))).all()):  # NaN is NaN
                continue
        if now is None or now.shape != tensor.shape or now.dtype != tensor.dtype:
            what = "nothing" if now is None else f"{now.dtype} {list(now.shape)}"
            raise SourceError(
                f"{model}: forward makes the buffer {name} {what}, which was {tensor.dtype}"
                f" {list(tensor.shape)}",
                hint="State keeps its shape and dtype: write into a buffer of a fixed size.",
            )
        yield one[name]


def _places(module: nn.Module, name: str) -> list[tuple[Any, Any]]:
    """Dicts and lists with the key by which each holds a buffer, that of its name first: several
    modules may, and so may objects of theirs, such as the layers of a cache.
    """
    path, _, key = name.rpartition(".")
    first = module.get_submodule(path)._buffers
    same = first[key]
    seen: set[int] = set()
    held = [place for each in module.modules() for place in _holders(vars(each), same, seen)]
    others = (place for place in held if not (place[0] is first and place[1] == key))
    return [(first, key), *others]


def _holders(held: Any, tensor: Tensor | None, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """Where a tensor is held within dicts, lists and plain objects, which are looked at once."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, (list, tuple)):
        items: list[tuple[Any, Any]] = list(enumerate(held))
    elif isinstance(held, dict):
        items = list(held.items())
    elif isinstance(held, (nn.Module, Tensor, type)) or not hasattr(held, "__dict__"):
        return
    else:
        yield from _holders(vars(held), tensor, seen)
        return
    for key, item in items:
        if item is tensor and not isinstance(held, tuple):
            yield held, key
        elif not isinstance(item, (str, bytes, int, float)):
            yield from _holders(item, tensor, seen)


def _sharing(module: nn.Module) -> dict[str, str]:
    """Buffers and parameters that are other tensors on one memory, by the name of either."""
    found: dict[int, str] = {}
    pairs: dict[str, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        place = tensor.untyped_storage().data_ptr()
        if not place:
            continue
        if place in found:
            pairs[name], pairs[found[place]] = found[place], name
        else:
            found[place] = name
    return pairs


def _fields(returned: Any) -> dict[str, Any]:
    """What a forward returned, by name; what has no name by its number."""
    if isinstance(returned, Mapping):
        return {str(key): value for key, value in returned.items()}
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {each.name: getattr(returned, each.name) for each in dataclasses.fields(returned)}
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return dict(zip(returned._fields, returned, strict=True))
    items = returned if isinstance(returned, (tuple, list)) else [returned]
    return {str(index): item for index, item in enumerate(items)}
