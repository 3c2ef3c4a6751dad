"""Record every place where Python reads the value of a tensor while a model runs.

A capture fails at such a read: `if x.sum() > 0`, `int(n)`, `x.tolist()`. The recorder runs the real
module on real inputs and records for each read its line, its value, and whether the tensor depends
on inputs or only on weights. A slice of a buffer by a size depends on sizes, which one run cannot
show; so each read has the history of its tensor, and two runs at different sizes are compared (see
`decide`).
"""

import hashlib
import linecache
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from enginecast.capture.python.locations import SourceLocation, calling_frames
from enginecast.capture.python.tensor_facts import written_by
from enginecast.errors import CaptureError

logger = logging.getLogger(__name__)

ReadKind = Literal["bool", "item", "int", "float", "index", "tolist", "numpy", "compare"]
Decides = Literal["inputs", "weights", "shapes"]

READERS: Mapping[str, ReadKind] = {
    "__bool__": "bool",
    "item": "item",
    "__int__": "int",
    "__float__": "float",
    "__index__": "index",
    "tolist": "tolist",
    "numpy": "numpy",
    "__array__": "numpy",
    "allclose": "compare",
    "equal": "compare",
    "is_nonzero": "compare",
}
MOST_READS = 10_000
"""Reads at one line after which a loop is considered endless."""
INPUTS = "inputs"
"""The history of a tensor that depends on the inputs' values."""


@dataclass(frozen=True)
class Read:
    """One read of a tensor's value by Python."""

    file: str
    line: int
    code: str
    """The text of that line."""
    function: str
    module: str
    """Dotted path of the module whose method this is; empty for the model itself."""
    kind: ReadKind
    value: Any
    """The value that was read."""
    decides: Decides
    """What the value depends on."""
    history: str = ""
    """Digest of how the tensor was computed from weights; "inputs" if it depends on inputs."""

    @property
    def place(self) -> SourceLocation:
        return SourceLocation(self.file, self.line)


class Recorder:
    """Records the reads of a run: `with Recorder(module, inputs) as seen: module(**inputs)`.

    Args:
        module: the module that runs; its submodules give the reads their paths.
        inputs: the tensors that the module will be called with.

    Raises:
        CaptureError: a line read MOST_READS values: its loop does not end.
    """

    def __init__(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        self.reads: list[Read] = []
        self._paths = {id(owner): name for name, owner in module.named_modules()}
        self._histories = _Histories(inputs.values())
        self._counts: dict[SourceLocation, int] = {}
        self._modes = ExitStack()

    def __enter__(self) -> "Recorder":
        for mode in (self._histories, _Readers(self)):
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._modes.__exit__(*error)
        finally:
            if error[0] is not None:
                # A model that compiles parts of itself, as torch.cond does, may have failed for
                # our modes; Dynamo would remember that in later runs.
                torch.compiler.reset()

    def note(self, kind: ReadKind, tensors: Sequence[Tensor], value: Any) -> None:
        """Add a read by the innermost frame of the user's code."""
        frame = next(calling_frames(), None)
        if frame is None:
            return
        place = SourceLocation.of_frame(frame)
        histories = [self._histories.of(tensor) for tensor in tensors]
        history = INPUTS if INPUTS in histories else histories[0]
        self.reads.append(
            Read(
                file=place.file,
                line=place.line,
                code=linecache.getline(*place).strip(),
                function=frame.f_code.co_qualname,
                module=self._paths.get(id(frame.f_locals.get("self")), ""),
                kind=kind,
                value=value,
                decides="inputs" if history == INPUTS else "weights",
                history=history,
            )
        )
        count = self._counts[place] = self._counts.get(place, 0) + 1
        if count >= MOST_READS:
            raise CaptureError(
                f"{place}\n    {self.reads[-1].code}\nread a tensor {count:,} times in one "
                "run: the loop has no end, or far too many rounds",
                hint="Bound the loop, or give inputs with which it ends: --inputs FILE.",
            )


def record(
    module: nn.Module,
    cases: Iterable[Mapping[str, Tensor]],
    call: Callable[[nn.Module, Mapping[str, Tensor]], object] = lambda module, inputs: module(
        **inputs
    ),
) -> list[list[Read]]:
    """The reads of a run on each case, each marked as depending on inputs, weights or sizes.

    A case that the model rejects, because random inputs violate its assumptions, gives no run.

    Args:
        module: the module, with real weights; it runs once for each case, without gradients.
        cases: inputs by name, of different sizes.
        call: runs the module on copies of them.

    Raises:
        CaptureError: a loop without end.
    """
    runs = []
    for inputs in cases:
        copies = {name: tensor.clone() for name, tensor in inputs.items()}
        try:
            with torch.no_grad(), Recorder(module, copies) as seen:
                call(module, copies)
        except CaptureError:
            raise
        except Exception:  # the model's own code may raise any
            logger.debug("no run for the recorder", exc_info=True)
            continue
        runs.append(seen.reads)
    return decide(runs)


def decide(runs: Sequence[Sequence[Read]]) -> list[list[Read]]:
    """Distinguish reads of weights from reads that depend on sizes.

    A tensor that is computed from weights in the same way at every size depends only on weights.
    """
    histories: dict[SourceLocation, set[tuple[str, ...]]] = {}
    for run in runs:
        found: dict[SourceLocation, list[str]] = {}
        for read in run:
            found.setdefault(read.place, []).append(read.history)
        for place, history in found.items():
            histories.setdefault(place, set()).add(tuple(history))

    def described(read: Read) -> Read:
        varies = read.decides == "weights" and len(histories[read.place]) > 1
        return replace(read, decides="shapes") if varies else read

    return [list(map(described, run)) for run in runs]


def place_of_reader() -> SourceLocation:
    """File and line of the innermost frame of the model's code; empty without one."""
    frame = next(calling_frames(), None)
    return SourceLocation("", 0) if frame is None else SourceLocation.of_frame(frame)


class _Readers(TorchFunctionMode):
    """Function mode that sees the calls by which Python reads a tensor."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        kind = READERS.get(getattr(func, "__name__", ""))
        if kind is not None and args and isinstance(args[0], Tensor):
            kept = value
            if kind == "numpy":  # a write into it would change the tensor only in eager
                kept = value.copy()
                kept.flags.writeable = False
            self._recorder.note(kind, [arg for arg in args if isinstance(arg, Tensor)], kept)
        return value


class _Histories(TorchDispatchMode):
    """Dispatch mode that tracks how tensors are computed, through every operator and in-place
    write.

    A history belongs to a storage, so views share it.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[StorageWeakRef, str] = {}
        for tensor in inputs:
            self._set(tensor, INPUTS)

    def of(self, tensor: Tensor) -> str:
        """The history of `tensor`; a tensor from before the run is a weight."""
        return self._known.get(StorageWeakRef(tensor.untyped_storage()), "weight")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves, _ = tree_flatten((args, kwargs or {}))
        history = self._joined(str(func), leaves)
        written = list(written_by(func, args, kwargs or {}))
        tree_map(lambda made: self._set(made, history), (written, result))
        return result

    def _joined(self, operator: str, leaves: Sequence[Any]) -> str:
        parts = [operator]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                known = self.of(leaf)
                if known == INPUTS:
                    return INPUTS
                parts.append(f"{known} {list(leaf.shape)}")
            else:
                parts.append(repr(leaf))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()

    def _set(self, value: Any, history: str) -> None:
        if isinstance(value, Tensor):
            self._known[StorageWeakRef(value.untyped_storage())] = history
