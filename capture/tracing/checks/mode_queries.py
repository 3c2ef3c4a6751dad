"""Find code that asks which torch modes are active, or whether something is exported.

Eager is compared with a program in a mode of our own, which such code can tell from plain eager, as
it can tell a trace.  So the steps of the user's code are counted in both: where they differ, it is
not known what the engine would have to do.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.outputs.flatten import Wanted, name_outputs
from enginecast.capture.python.locations import SourceLocation, is_user_code
from enginecast.capture.python.preserve_caches import preserving_caches
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.python.recompile import replaced
from enginecast.capture.sources.source import Source
from enginecast.capture.tracing.answers.questions import as_eager
from enginecast.capture.tracing.ladder.trace import Traced

SEED = 0
FLAGS = ("_is_exporting_flag", "_is_compiling_flag")
"""Of `torch.compiler`: true while torch.export traces."""
Around = Callable[[nn.Module], AbstractContextManager[object]]


class _Instruction(NamedTuple):
    file: str
    line: int
    offset: int


class _IdleDispatch(TorchDispatchMode):
    """Does nothing but be there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _IdleFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def mode_dependence(
    source: Source, traced: Traced, wanted: Wanted, *, answered: bool, exporting: bool
) -> str:
    """Where the user's code runs other instructions in a mode of torch's than in plain eager: a
    sentence, empty where it does not or where that cannot be said.

    Args:
        answered: whether the user's code is answered that nothing is traced.
        exporting: whether to look for code that asks for an export, too, since nothing else
            compares the program's operators with eager's.
    """
    module = source.eager()
    name_outputs(module, tuple(spec.name for spec in traced.inputs), wanted)
    inputs = sample(traced.inputs, example_sizes(traced.inputs), SEED)
    answering: Around = as_eager if answered else (lambda _: nullcontext())
    try:
        with quiet_torch():
            # Twice: what a first call sets up shows as a difference once.
            for _ in range(2):
                inside = _steps(module, inputs, partial(_asked, answering, exporting))
                plain = _steps(module, inputs, lambda _: nullcontext())
                if inside == plain:
                    return ""
    except Exception:  # the model's own code, or what it calls, in our modes
        return ""
    found = next(each for each in (*plain, *inside) if plain[each] != inside[each])
    place = SourceLocation(found.file, found.line)
    times = (plain[found], inside[found])
    return (
        f"unverified branch: {place}: eager comes here {times[0]} times, and the code, which asks"
        f" whether it is traced or which modes of torch are active, {times[1]} times in these"
    )


@contextmanager
def _asked(answering: Around, exporting: bool, module: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        if exporting:
            for flag in FLAGS:
                stack.enter_context(replaced(torch.compiler, flag, True))
            stack.enter_context(_IdleFunctions())
        stack.enter_context(answering(module))
        stack.enter_context(_IdleDispatch())  # type: ignore[no-untyped-call]
        yield


def _steps(
    module: nn.Module, inputs: Mapping[str, Tensor], around: Around
) -> "Counter[_Instruction]":
    """How often each instruction of the user's code runs."""
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    with torch.no_grad(), preserving_caches(module), around(module), _counted() as counts:
        module(**copies)
    return counts


@contextmanager
def _counted() -> Iterator["Counter[_Instruction]"]:
    counts: Counter[_Instruction] = Counter()

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_user_code(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        return stepped

    def stepped(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            counts[_Instruction(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_lasti)] += 1
        return stepped

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield counts
    finally:
        sys.settrace(before)
