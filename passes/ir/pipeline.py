"""Run a pipeline, with the same checks after every pass."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.export import ExportedProgram

from enginecast.errors import (
    CaptureError,
    EnginecastError,
    PassDefectError,
    PassError,
    SourceError,
)
from enginecast.passes.ir.base import CapturePass, Pass, PassContext, Site, SiteKey
from enginecast.passes.ir.block_view import run_pass
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import tracked_outputs
from enginecast.passes.ir.sites import number
from enginecast.passes.ir.source import source_line
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.ir.varying_sizes import fixed_sizes
from enginecast.plugins import defect_of, is_foreign
from enginecast.progress import counted


@dataclass(frozen=True)
class PassRun:
    """The result of one pass, with its time including checks and excluding observers."""

    pass_: Pass
    sites: tuple[Site, ...]
    seconds: float

    @property
    def rewritten(self) -> int:
        """Number of sites that were rewritten."""
        return sum(site.rewritten for site in self.sites)


Observer = Callable[[Pass, ExportedProgram, PassRun], None]
"""Called after every pass with the program as that pass left it."""


def run_pipeline(
    passes: Sequence[Pass],
    program: ExportedProgram,
    context: PassContext,
    observe: Sequence[Observer] = (),
    leave: Sequence[frozenset[SiteKey]] = (),
) -> list[PassRun]:
    """Run the passes over the program, in place, and check the program after each.

    Args:
        program: rewritten in place; after an error it is in an undefined state.
        observe: called in order after each pass that succeeded.
        leave: for each pass, the sites that it skips besides those of the context; empty: none.
            Keys are per pass: two passes may use one key for different places.

    Raises:
        PassError: an op writes in place; or what a pass ensures no longer holds at the end.  Errors
            of this package that a pass raises keep their type.
        PassDefectError: a pass or an observer failed, or the program is not valid after a pass:
            names the pass and those before it, and the line of the pass.
    """
    runs: list[PassRun] = []
    is_functional = False
    pairs = list(zip(passes, leave or [frozenset[SiteKey]()] * len(passes), strict=True))
    for pass_, skip in counted(pairs, "passes"):
        if not (is_functional or isinstance(pass_, CapturePass)):
            _require_functional(program)
            is_functional = True
        before = [run.pass_.name for run in runs]
        own = replace(context, skip=context.skip | skip)
        with _blame(pass_, f"pass '{pass_.name}'", before):
            start = time.perf_counter()
            pass_.requires(program)
            with _checked(program):
                sites = number(run_pass(pass_, program, own))
            runs.append(PassRun(pass_, tuple(sites), time.perf_counter() - start))
        for observer in observe:
            with _blame(pass_, f"looking at the program after pass '{pass_.name}'", before):
                observer(pass_, program, runs[-1])
    for pass_ in passes:
        with _blame(pass_, "the pipeline", [run.pass_.name for run in runs]):
            pass_.ensures(program)
    program.graph_module.recompile()  # of the code that fx has, once: until here nobody runs it
    return runs


def _require_functional(program: ExportedProgram) -> None:
    for node in all_nodes(program):
        if has(node, Trait.WRITES):  # a pass could move a read past a write
            place = source_line(node) or node.name
            raise PassError(
                f"{node.target} at {place} writes in place, and passes expect a functional program",
                hint="The pass functionalize makes a program functional; every capture runs it.",
            )


SAMPLES = 256
"""Elements of a weight that are compared before and after a pass."""


@contextmanager
def _checked(program: ExportedProgram) -> Iterator[None]:
    """Keep the signature in sync with the graph while it is edited, and check both afterwards.

    A pass may not write to a weight: the reference shares the tensor and would change with it.  Nor
    may it fix a size: code that reads a symbolic size as a number specializes it in every program
    that shares the symbol.

    Raises:
        PassDefectError: names the weight or the size.
    """
    weights = {**program.state_dict, **program.constants}
    tensors = {name: found for name, found in weights.items() if isinstance(found, Tensor)}
    before = {name: _state_of(tensor) for name, tensor in tensors.items()}
    sizes = fixed_sizes(program)
    with tracked_outputs(program):
        yield
    for symbol, size in fixed_sizes(program).items() - sizes.items():
        bounds = program.range_constraints[symbol]
        raise PassDefectError(
            f"it specializes a size from {bounds.lower}..{bounds.upper} to {size}",
            hint="Compute fake values with enginecast.passes.ir.edit.insert, which reads no size.",
        )
    for name, tensor in tensors.items():
        version, samples = _state_of(tensor)
        if version != before[name][0] or not torch.equal(samples, before[name][1]):
            raise PassDefectError(
                f"it writes to the weight '{name}', which other programs share",
                hint="Leave a new tensor in its place: enginecast.passes.ir.edit.add_weight.",
            )
    program.graph.lint()
    # Undocumented, but the only check that signature, graph and state agree.
    program.validate()


def _state_of(tensor: Tensor) -> tuple[int, Tensor]:
    """A tensor's version, which writes through `.data` bypass, and a sample of its bytes."""
    version = 0 if tensor.is_inference() else tensor._version
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    if is_fake(tensor) or not is_plain or not tensor.numel():
        return version, torch.empty(0)
    step = -(-tensor.numel() // SAMPLES)
    if tensor.is_contiguous():
        samples = tensor.detach().view(-1)[::step]
    else:  # by index: a flat view of a tensor without memory of its own (an expand) would be a copy
        places = torch.arange(0, tensor.numel(), step)
        samples = tensor.detach()[torch.unravel_index(places, tensor.shape)]
    return version, samples.clone().view(torch.uint8)


@contextmanager
def _blame(pass_: Pass, what: str, before: Sequence[str]) -> Iterator[None]:
    """Add to any error the pass that raised it and the passes that ran before, unless it is the
    model that is wrong.
    """
    place = f"{what} (after {', '.join(before)})" if before else what
    try:
        yield
    except (CaptureError, SourceError):
        raise
    except EnginecastError as error:
        # Raised again as it is: a copy could lose what its subclass carries.
        error.message = f"{place}: {error.message}"
        error.args = (error.message,)
        raise
    except BaseException as error:  # a pass may come from another package, and raise anything
        if not is_foreign(error):
            raise
        raise defect_of(type(pass_).__module__, place, error, PassDefectError) from error
