"""Explain why torch.export refused a model: the line of the user's code, the reason, and what to
do.

The facts are those of torch 2.13: a non-strict export names the culprit in the traceback, dynamo
in the text of the message. Of a dimension that cannot vary, the message lists the guards that not
all sizes satisfy; the place of each is in the ShapeEnv that stands in the frames of the error.
"""

import dis
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimConstraints, ShapeEnv

from enginecast.capture.python.locations import SourceLocation, is_model_code, origin_of
from enginecast.capture.python.recompile import replaced
from enginecast.installation import chain_of

Kind = Literal[
    "data-dependent-branch",
    "data-dependent-size",
    "data-leaves-torch",
    "specialized-dimension",
    "unsupported-output",
    "unsupported-python",
    "scripted-part",
    "other-tensors",
    "derivative",
    "operator",
    "model-error",
]

REASONS: dict[Kind, tuple[str, str]] = {
    "data-dependent-branch": (
        "a Python branch or loop depends on the value of a tensor",
        "Rewrite it with torch.where or torch.cond, or decide it before the export.",
    ),
    "data-dependent-size": (
        "a size or index depends on the value of a tensor",
        "Bound it with torch._check, or compute it from shapes.",
    ),
    "data-leaves-torch": (
        "a tensor's values are read by Python (.tolist(), .numpy(), float(x))",
        "Stay with tensor operations.",
    ),
    "specialized-dimension": (
        "the model's code does not take all sizes of a dimension that was to vary",
        "Narrow or fix it: --dynamic NAME:DIM=MIN..MAX or --dynamic NAME:DIM=K.",
    ),
    "unsupported-output": (
        "the model returns an object that is not a tensor or container of tensors",
        "Return tensors in tuples, dicts or dataclasses; switch caches off.",
    ),
    "unsupported-python": (
        "the code uses Python that torch.export cannot follow",
        "Write it with tensor operations, or move it out of forward.",
    ),
    "scripted-part": (
        "a part of the model is TorchScript, which torch.export does not take",
        "Give the nn.Module that it was made from.",
    ),
    "other-tensors": (
        "the model makes tensors that are not dense: nested, packed, quantized, or of a class of"
        " its own",
        "Pad what is nested or packed, and mask it; --precision int8 quantizes.",
    ),
    "derivative": (
        "the model computes derivatives (torch.func.grad, vjp, jacrev, ...) in a way that"
        " torch.export does not follow",
        "Write the derivative with tensor operations, or compute it outside of the model.",
    ),
    "operator": (
        "an operator refuses the shapes or dtypes of its inputs",
        "Check the example inputs: --inputs FILE.safetensors.",
    ),
    "model-error": (
        "the model's own code raised an error",
        "Check the example inputs: --inputs FILE.safetensors.",
    ),
}

BY_CLASS: dict[str, Kind] = {
    "GuardOnDataDependentSymNode": "data-dependent-branch",
    "UserErrorDynamicControlFlow": "data-dependent-branch",
    "PendingUnbackedSymbolNotFound": "data-dependent-size",
    "DynamicOutputShapeException": "data-dependent-size",
    "DataDependentOutputException": "data-leaves-torch",
    "ConstraintViolationError": "specialized-dimension",
    "UnsupportedOperatorException": "operator",
    "UnsupportedFakeTensorException": "operator",
    "TorchRuntimeError": "operator",
    "Unsupported": "unsupported-python",
}

BY_TEXT: tuple[tuple[str, Kind], ...] = (
    # Older torch says it so, and people still paste it into reports.
    ("dynamic control flow is not supported", "data-dependent-branch"),
    ("Data-dependent branching", "data-dependent-branch"),
    ("Could not guard on data-dependent expression", "data-dependent-branch"),
    ("Could not extract specialized integer", "data-dependent-size"),
    ("but got FakeTensor", "data-dependent-size"),
    ("Constraints violated", "specialized-dimension"),
    ("not a known type", "unsupported-output"),
    ("pytree-able", "unsupported-output"),
    (".tolist() is not supported", "data-leaves-torch"),
    (".numpy() is not supported", "data-leaves-torch"),
    ("is not an instance of torch.nn.Parameter", "scripted-part"),
    ("aten._nested_", "other-tensors"),
    ("Creating a new Tensor subclass", "other-tensors"),
    ("PackedSequence", "other-tensors"),
    ("meta conversion to view functorch tensor", "derivative"),
    ("'Tensor' object has no attribute 'constant'", "derivative"),
    ("Cannot access data pointer", "data-leaves-torch"),
    ("format string passed to Sym", "data-leaves-torch"),
    ("Couldn't swap", "unsupported-python"),
    ("FakeTensor.__new__() missing", "unsupported-python"),
)
MORE: tuple[tuple[str, tuple[str, str]], ...] = (
    (
        "Could not extract specialized integer",
        (
            "Python needs a plain number here, to count, index or choose by, and it is read from a"
            " tensor",
            "Let the caller give it as an int, for an engine of its own; or stack the choices, and"
            " index them with the tensor.",
        ),
    ),
    (
        "Pending unbacked symbols",
        (
            "{op} reads a size or index out of a tensor",
            "Read the number first, n = tensor.item(), and pass n.",
        ),
    ),
    (
        "Couldn't swap",
        (
            "the model casts weights of its modules while it runs, as layerwise casting does",
            "Give it without that, in the dtype that it computes in; --precision stores the weights"
            " in fewer bits.",
        ),
    ),
    (
        "FakeTensor.__new__() missing",
        (
            "hooks load the weights while the model runs, as accelerate's device_map and"
            " cpu_offload do",
            "Load the model without them, or take them off:"
            " accelerate.hooks.remove_hook_from_module(model, recurse=True).",
        ),
    ),
)
"""By what torch says: a reason and hint that tell more than those of the kind."""
PACKED = (
    "a recurrent layer runs on packed sequences (pack_padded_sequence)",
    "Run it on the padded batch, and take the state of each row at its own length:"
    " y[torch.arange(len(y)), lengths - 1].",
)
DISTRIBUTION = (
    "torch.distributions checks the values that a distribution is made of",
    "Make the distribution with validate_args=False, as in Normal(mean, scale,"
    " validate_args=False).",
)

SAYS_NOTHING: frozenset[Kind] = frozenset({"operator", "model-error"})
"""Kinds of which the reason is too general to stand alone."""
OF_VALUES: frozenset[Kind] = frozenset({"data-dependent-branch", "data-dependent-size"})
"""Kinds of which torch's own message has symbols that mean nothing to who wrote the line."""
_GUARD = re.compile(
    r"Not all values of (?P<name>\w+) = L\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]"
    r".*?satisfy the generated guard (?P<guard>.+?)\.?$",
    re.MULTILINE,
)
CONSTANT = re.compile(
    r"You marked (?:\d+\*_)?(?P<name>\w+) as dynamic but your code specialized it to be a constant "
    r"\((?P<size>\d+)\)"
)
SIZE = re.compile(r"L\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]")
_USER_FRAME = "_get_user_frame"
_IS_ASSERT = "_is_python_assert"
_SUGGESTS = "prettify_results"
_MOST_SIZES = 512
"""Sizes that a guard is tried on to learn whether it is one of those that fail."""


@dataclass(frozen=True)
class Refusal:
    """One refusal, fit for a message and for deciding what to try next."""

    kind: Kind
    file: str
    """The user's file; empty when torch names none."""
    line: int
    code: str
    """The text of that line."""
    reason: str
    hint: str
    detail: str
    """First lines of torch's own message."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def in_full(self) -> str:
        """The reason and torch's own message."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason

    @property
    def in_short(self) -> str:
        """The reason, with torch's own message only where the reason alone says nothing."""
        return self.in_full if self.kind in SAYS_NOTHING else self.reason

    def message(self) -> str:
        """The refusal in words, without the hint."""
        code = self.code or "(the source of this line is not available)"
        where = f" at {self.place}\n    {code}\n" if self.file else ": "
        return f"torch.export refused the model{where}{self.in_full}"


def explain(error: BaseException) -> Refusal:
    """Explain an exception that torch.export raised; looks at it and changes nothing."""
    chain = list(chain_of(error))
    kinds = [kind for kind in map(_kind, chain) if kind is not None]
    kind: Kind = kinds[0] if kinds else "model-error"
    places = [_place(link) for link in chain]
    if kind == "specialized-dimension":
        places = [_culprit(link) for link in chain] + places
    if kind == "derivative":
        places += [_reader(link) for link in chain]
    file, line = next((place for place in places if place is not None), ("", 0))
    texts = list(map(str, chain))
    more = (each for said, each in MORE if any(said in text for text in texts))
    reason, hint = next(more, REASONS[kind])
    if any(map(_is_packed, chain)):
        reason, hint = PACKED
    elif any(map(_checks_a_distribution, chain)):
        reason, hint = DISTRIBUTION
    # The operator that torch was tracing when it raised an error.
    found = "an operator"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        func = frame.f_locals.get("func")
        if isinstance(func, torch._ops.OpOverload):
            found = f"torch.{func._schema.name.removeprefix('aten::')}"
    reason = reason.format(op=found)
    described = violations(str(error))
    if kind == "specialized-dimension" and described:
        reason = f"{reason}: {described}"
    fixes = re.search(r"Suggested fixes:\s*\n((?:[ \t]+\S.*\n?)+)", str(error))
    if kind == "specialized-dimension" and fixes:
        reason = f"{reason}; torch suggests {' '.join(fixes[1].split())}"
    code = linecache.getline(file, line).strip() if file else ""
    is_told = bool(file) and (kind in OF_VALUES or (reason, hint) != REASONS[kind])
    return Refusal(kind, file, line, code, reason, hint, "" if is_told else _detail(error))


def _kind(error: BaseException) -> Kind | None:
    message = str(error).lower()
    for text, kind in BY_TEXT:
        if text.lower() in message:
            return kind
    for base in type(error).__mro__:
        if base.__name__ in BY_CLASS:
            return BY_CLASS[base.__name__]
    return None


def _place(error: BaseException) -> SourceLocation | None:
    """The innermost line of code that is neither torch's, Python's, nor ours."""
    frames = [*map(SourceLocation.of_summary, traceback.extract_tb(error.__traceback__))]
    # Those before torch's first one are who asked for the export.
    first = next((i for i, place in enumerate(frames) if origin_of(place.file) == "torch"), 0)
    _, _, quoted = str(error).partition("from user code")
    places = [*reversed(SourceLocation.in_text(quoted)), *reversed(frames[first:])]
    known = (place for place in places if is_model_code(place.file))
    return next(known, None) or next((p for p in places if origin_of(p.file) == "exec"), None)


_UNSAID = "Expected cond to be True, but got False"
"""What torch says of a check without a message of its own."""


def _detail(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if first.startswith(_UNSAID):
        return (
            "expected a condition that this code checks to hold, and for these inputs it does not"
        )
    return f"{type(error).__name__}: {first[:200]}"


@contextmanager
def guards_at_model_code() -> Iterator[None]:
    """Let guards that operators of torch make remember the line of the model that called them."""
    original: Callable[[ShapeEnv], FrameType | None] | None = getattr(ShapeEnv, _USER_FRAME, None)
    if original is None:  # a torch that names it otherwise: guards keep the places they have
        yield
        return
    outside = sys._getframe(2)  # whoever asks for the export, behind the context manager

    def user_frame(self: ShapeEnv) -> FrameType | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not outside:
            if is_model_code(frame.f_code.co_filename):
                return frame
            frame = frame.f_back
        return original(self)  # the model is not running at all

    is_assert: Callable[[ShapeEnv], bool] = getattr(ShapeEnv, _IS_ASSERT)

    def is_plain_assert(self: ShapeEnv) -> bool:
        return is_assert(self) and not _jumps_if_false(user_frame(self))

    with (
        replaced(ShapeEnv, _USER_FRAME, user_frame),
        replaced(ShapeEnv, _IS_ASSERT, is_plain_assert),
    ):
        yield


@contextmanager
def suggestions_left_out() -> Iterator[None]:
    """Within the block, torch says which guards do not hold even where it has no better sizes to
    suggest: for `(-n) % 8` it raises an AssertionError about the suggestion instead.
    """
    plain: Callable[..., str] | None = getattr(DimConstraints, _SUGGESTS, None)
    if plain is None:
        yield
        return

    def suggested(*arguments: Any) -> str:
        try:
            return plain(*arguments)
        except AssertionError:
            return ""

    with replaced(DimConstraints, _SUGGESTS, suggested):
        yield


def _jumps_if_false(frame: FrameType | None) -> bool:
    """Whether a frame is at the condition of `assert not x`, which torch takes for `assert x`."""
    if frame is None:
        return False
    jumps = (
        step.opname
        for step in dis.get_instructions(frame.f_code)
        if step.offset >= frame.f_lasti and step.opname.startswith("POP_JUMP")
    )
    return "FALSE" in next(jumps, "")


def violations(message: str) -> str:
    """What torch.export's message says of each dimension, in few words; empty when it says none."""
    names = {(m["input"], m["dim"]): m["name"] for m in guards_in(message)}

    def named(match: re.Match[str]) -> str:
        return names.get((match["input"], match["dim"]), f"{match['input']}.shape[{match['dim']}]")

    described = [f"{m['name']} is always {m['size']}" for m in CONSTANT.finditer(message)]
    described += [
        f"not every {m['name']} satisfies {SIZE.sub(named, m['guard'])}" for m in guards_in(message)
    ]
    return "; ".join(dict.fromkeys(described))


def guards_in(message: str) -> Iterator[re.Match[str]]:
    """The guards that torch names; since 2.14 it writes `torch.sym_max` for `max`."""
    return _GUARD.finditer(message.replace("torch.sym_", ""))


def place_of(guard: Any) -> SourceLocation | None:
    """The line of a model that a guard of a trace comes from; None where it is torch's own."""
    frame = guard.sloc.framework_loc
    if not isinstance(frame, traceback.FrameSummary) or not is_model_code(frame.filename):
        return None
    return SourceLocation.of_summary(frame)


def _culprit(error: BaseException) -> SourceLocation | None:
    """The line of the first guard that some size does not satisfy; None when unknown.  One between
    two sizes may hold because these are tied, so one of a single size goes before it.
    """
    between: SourceLocation | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in [*frame.f_locals.values()]:
            if not isinstance(value, FakeTensorMode) or value.shape_env is None:
                continue
            for guard in value.shape_env.guards:
                place = place_of(guard)
                if place is not None and _can_fail(guard.expr, value.shape_env):
                    if len(guard.expr.free_symbols) == 1:
                        return place
                    between = between or place
    return between


def _reader(error: BaseException) -> SourceLocation | None:
    """The line that reads the constant which torch could not put into the program."""
    found: SourceLocation | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("node")
        if isinstance(node, torch.fx.Node):
            texts = "\n".join(near.stack_trace or "" for near in (node, *node.users))
            found = next((p for p in SourceLocation.in_text(texts) if is_model_code(p.file)), found)
    return found


def _is_packed(error: BaseException) -> bool:
    """Whether it comes from a recurrent layer of torch's that got packed sequences."""
    return any(
        isinstance(frame.f_locals.get("self"), nn.RNNBase)
        and isinstance(frame.f_locals.get("batch_sizes"), Tensor)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _checks_a_distribution(error: BaseException) -> bool:
    """Whether it comes from where torch.distributions validates its arguments."""
    return any(
        frame.f_globals.get("__name__") == "torch.distributions.distribution"
        and frame.f_code.co_name in ("__init__", "_validate_sample")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _can_fail(guard: Any, environment: ShapeEnv) -> bool:
    """Whether some size in range breaks a guard; one that cannot be tried may."""
    symbols = list(guard.free_symbols)
    if len(symbols) != 1:
        return True
    allowed = environment.var_to_range.get(symbols[0])
    low = 1 if allowed is None else max(int(allowed.lower), 1)
    try:
        return any(not guard.subs(symbols[0], low + step) for step in range(_MOST_SIZES))
    except (TypeError, ValueError, ArithmeticError):
        return True
