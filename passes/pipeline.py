"""Build a pipeline from its text; run it, with the same checks after every pass."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch.export import ExportedProgram

from enginecast.errors import EnginecastError, PassError, SpecError
from enginecast.passes.base import Pass, PassContext, Site, SiteKey
from enginecast.passes.block_view import run_pass
from enginecast.passes.cast_borders import check_casts
from enginecast.passes.graph_edit import tracked_outputs
from enginecast.passes.options import pass_from_spec
from enginecast.passes.registry import pass_class
from enginecast.passes.sites import number
from enginecast.passes.spec import Located, parse_located


@dataclass(frozen=True)
class PassRun:
    """What one pass did, and how long it took, checks included and observers not."""

    pass_: Pass
    sites: tuple[Site, ...]
    seconds: float

    @property
    def rewritten(self) -> int:
        """Number of sites that were rewritten."""
        return sum(site.rewritten for site in self.sites)


Observer = Callable[[Pass, ExportedProgram, PassRun], None]
"""Called after every pass with the program as that pass left it: dump, diff, numerics."""


def build(text: str) -> tuple[Pass, ...]:
    """Make the passes that a pipeline spec names, in order.  A pass may occur more than once.

    Raises:
        SpecError: the text is not in the grammar, names an unknown pass or option, or has a pass
            before another that must come earlier.
    """
    elements = parse_located(text)
    passes = tuple(_make(element) for element in elements)
    for index, pass_ in enumerate(passes):
        earlier = {other.name for other in passes[:index]}
        later = {other.name for other in passes[index + 1 :]}
        late = sorted((pass_.after & later) - earlier)
        if late:
            raise elements[index].place.error(
                f"pass '{pass_.name}' must come after '{late[0]}'",
                hint=f"Move '{late[0]}' before '{pass_.name}'.",
            )
    return passes


def run_pipeline(
    passes: Sequence[Pass],
    program: ExportedProgram,
    context: PassContext,
    observe: Sequence[Observer] = (),
    leave: Sequence[frozenset[SiteKey]] = (),
) -> list[PassRun]:
    """Run the passes over the program, in place, and check the program after each.

    Args:
        passes: what `build` made.
        program: rewritten in place; after an error it is in an undefined state.
        context: handed to every pass.
        observe: called in order after each pass that succeeded.
        leave: for each pass the sites that it alone leaves out, besides those of the context;
            empty: none.  Two passes may call different places by one key.

    Raises:
        PassError: a pass or an observer failed, or the program is not valid after a pass; names the
            pass and those before it.  Errors of this package keep their type.  Or casts between
            float dtypes are left that stand at no border, after dtypes were decided.
    """
    runs: list[PassRun] = []
    for pass_, skip in zip(passes, leave or [frozenset()] * len(passes), strict=True):
        before = [run.pass_.name for run in runs]
        own = replace(context, skip=context.skip | skip)
        with _blame(f"pass '{pass_.name}'", before):
            runs.append(_run_one(pass_, program, own))
        for observer in observe:
            with _blame(f"looking at the program after pass '{pass_.name}'", before):
                observer(pass_, program, runs[-1])
    if any(pass_.name == "unify-dtype" for pass_ in passes):
        with _blame("the pipeline", [run.pass_.name for run in runs]):
            check_casts(program)
    return runs


def _make(element: Located) -> Pass:
    try:
        cls = pass_class(element.spec.name)
    except SpecError as error:
        raise element.place.error(error.message, hint=error.hint) from error
    return pass_from_spec(cls, element)


def _run_one(pass_: Pass, program: ExportedProgram, context: PassContext) -> PassRun:
    start = time.perf_counter()
    pass_.requires(program)
    with _tracked_edit(program):
        sites = run_pass(pass_, program, context)
    return PassRun(pass_, tuple(number(sites)), time.perf_counter() - start)


@contextmanager
def _tracked_edit(program: ExportedProgram) -> Iterator[None]:
    """Keep the signature in step with the graph while it is edited, and check both afterwards.

    `validate` of torch is undocumented, and the only check that signature, graph and state fit.
    """
    with tracked_outputs(program):
        yield
    program.graph_module.recompile()
    program.graph.lint()
    program.validate()


@contextmanager
def _blame(what: str, before: Sequence[str]) -> Iterator[None]:
    """Say in any error which pass it comes from and which passes had run before."""
    place = f"{what} (after {', '.join(before)})" if before else what
    try:
        yield
    except EnginecastError as error:
        # Raised again as it is: a copy could lose what its subclass carries.
        error.message = f"{place}: {error.message}"
        error.args = (error.message,)
        raise
    except Exception as error:  # a pass may come from another package, and raise anything
        raise PassError(f"{place}: {type(error).__name__}: {error}") from error
