"""Find code that detects tracing: its behavior then differs from eager's.

`torch.compiler.is_exporting()` can be answered as eager answers it.  A test of a tensor's type or
of how it prints cannot, and shows only where eager runs on real tensors.
"""

import dis
import re
from collections import Counter

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.capture.control_flow.converters.restructure import user_functions
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.outputs.flatten import Wanted, name_outputs
from enginecast.capture.python.locations import SourceLocation, is_model_code, is_user_code
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.python.recompile import replaced
from enginecast.capture.sources.base.source import Source
from enginecast.capture.tracing.attempt import OF_OWN_CODE
from enginecast.capture.tracing.sizes.fingerprint import (
    ALIASES,
    COPIES,
    RESHAPES,
    SELECTS,
    Walk,
    Walker,
)
from enginecast.capture.tracing.torch_export import Traced, names_with_lines
from enginecast.passes.ir.blocks import all_nodes

SEED = 0
OWN = (
    "_transformer_encoder",
    "_native_multi_head",
    "aminmax",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "mkldnn_rnn",
    "linspace",
    "im2col",
    "rand",
    "normal",
    "uniform",
    "bernoulli",
)
"""Begin the names of operators that torch itself takes in eager alone or calls otherwise there, as
products of slices by their strides, or draws with."""
MODES = re.compile(r"_(dispatch|function)_(mode|stack)|_is_(exporting|compiling)_flag")
"""Is in the names by which code asks for modes."""
KEEPING = COPIES | ALIASES | RESHAPES | SELECTS
"""Operators that compute nothing: a trace may have more or fewer of them."""


def unlike_eager(source: Source, traced: Traced, wanted: Wanted) -> str:
    """Where the user's code runs other operators on real tensors than its program, whose weights
    are fake still: a sentence, empty where it does not or where that cannot be said, as of code
    that was rewritten.
    """
    empty, is_strict = source.empty(), traced.attempt.is_strict
    if not any(map(_is_users, empty.modules())):
        return ""
    if place := _asking_for_modes(empty):
        return (
            f"unverified branch: {place}: the code asks which modes of torch are active, and it is"
            " compared with the trace in one"
        )
    if traced.attempt.name not in OF_OWN_CODE or traced.had_levels:
        return ""
    module, names = source.eager(), tuple(spec.name for spec in traced.inputs)
    for each in (empty, module):
        name_outputs(each, names, wanted)
    inputs = sample(traced.inputs, example_sizes(traced.inputs), SEED)
    try:
        # In inference mode eager runs some operators whole that a trace takes apart.
        with quiet_torch(), replaced(torch, "inference_mode", torch.no_grad):
            walker = Walker(empty, traced.program, traced.inputs)
            eager = walker.real(module, inputs, names_with_lines(module))
            captured = walker.captured(example_sizes(traced.inputs), copies_count=eager.writes)
    except Exception:  # the model's own code
        return ""
    if eager.outputs == captured.outputs:
        return ""
    step, other = eager.leaves(captured), captured.leaves(eager)
    numpy = (step, other) if is_strict else (step,)
    is_torchs = any(found is not None and _is_torchs(found.name) for found in (step, other))
    is_numpys = any(found is not None and found.name == "lift_fresh" for found in numpy)
    # A program runs below this function: the lines that led there are not those of the model.
    place = step.place if step is not None else None
    is_others = place is None or not is_user_code(place.file)
    if is_torchs or is_numpys or is_others or eager.has_strangers or captured.has_strangers:
        # Of what comes behind, numbers say nothing: what Dynamo makes of numpy, values decide.
        return "" if is_strict else _on_other_lines(eager, captured, traced.program)
    assert step is not None
    assert place is not None
    return _sentence(place, step.name, other.name if other is not None else "nothing more")


def _asking_for_modes(module: nn.Module) -> SourceLocation | None:
    """Where the user's code may ask which modes of torch are active, or whether one exports, by a
    private name: the answer differs between eager alone and eager that is compared.
    """
    for function in user_functions(module):
        for step in dis.get_instructions(function):
            if isinstance(step.argval, str) and MODES.search(step.argval) and step.positions:
                return SourceLocation(function.__code__.co_filename, step.positions.lineno or 0)
    return None


def _on_other_lines(eager: Walk, captured: Walk, program: ExportedProgram) -> str:
    """Where a line of the user's computes something in eager and nothing in the program, or the
    other way round, by an operator that the other one runs less often.
    """
    counts, others = (
        Counter(step.name for step in walk.steps if step.is_live) for walk in (eager, captured)
    )
    led = {place.resolved for step in eager.steps for place in step.callers}
    passed = {place for node in all_nodes(program) for place in _places(node)}
    for step in eager.steps:
        place = step.callers[0].resolved if step.is_live and step.callers else None
        if place is None or place in passed or not is_user_code(place.file):
            continue
        if _is_more(step.name, counts, others):
            return _sentence(place, step.name, "nothing")
    for node in all_nodes(program):
        place = next((each for each in _places(node) if is_model_code(each.file)), None)
        if place is None or place in led or not is_user_code(place.file):
            continue
        name = str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
        if _is_more(name, others, counts):
            return _sentence(place, "nothing", name)
    return ""


def _is_more(name: str, counts: Counter[str], others: Counter[str]) -> bool:
    """Whether an operator runs more often than elsewhere; not those that compute nothing, nor those
    that torch may run in one place alone.
    """
    return counts[name] > others[name] and not _is_torchs(name)


def _is_torchs(name: str) -> bool:
    """Whether torch decides where an operator runs: a product of a slice is folded into two
    dimensions on fake tensors, and expanded to three on real ones.
    """
    return name in KEEPING or name.startswith(OWN)


def _places(node: Node) -> list[SourceLocation]:
    """The lines that led to a node, the innermost first."""
    trace = node.meta.get("stack_trace") or ""
    return [place.resolved for place in reversed(SourceLocation.in_text(trace))]


def _sentence(place: SourceLocation, ran: str, other: str) -> str:
    return (
        f"unverified branch: {place}: eager runs {ran}, and the trace, which the code can tell from"
        f" eager, {other}"
    )


def _is_users(module: nn.Module) -> bool:
    """Whether the user wrote the code of a module."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return code is not None and is_user_code(code.co_filename)
