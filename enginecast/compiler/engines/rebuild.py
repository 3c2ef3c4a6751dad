"""An engine built again with values inside as further outputs: of a program, what it chose, or what
leaves its modules.
"""

import difflib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.compiler.engines.lower_and_run import dtype_name, lowering_request, unsealed
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.errors import UsageError
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import LoweringRequest
from enginecast.passes.ir.edit import add_outputs, structural_copy, value
from enginecast.runtime.bundle.manifest import EngineRecord, Manifest, Output
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import session_class
from enginecast.runtime.sessions.session import Session
from enginecast.verification.boundaries import leaving


@dataclass(frozen=True)
class Rebuild:
    """What an engine was built with, to build others of the kind from programs."""

    model: Prepared
    config: EngineConfig
    manifest: Manifest
    record: EngineRecord
    folder: Path | None
    """Where engines are lowered, each into a temporary folder; None: the system's."""
    threads: int | None

    @contextmanager
    def opened(
        self, program: ExportedProgram, kept: Sequence[Output]
    ) -> Iterator[tuple[Engine, Session]]:
        """An engine of a program that returns more than the model.

        Args:
            kept: the outputs that it returns after those of the model.

        Raises:
            EnginecastError: it cannot be lowered, or does not open.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            folder = Path(temporary)
            request = lowering_request(self.model, self.config, program, folder)
            request = replace(request, outputs=(*request.outputs, *(one.name for one in kept)))
            artifact = target_of(self.config.target).lower(request)
            manifest = msgspec.structs.replace(self.manifest, kept=tuple(kept))
            bundle = unsealed(folder, manifest, artifact.files)
            session = session_class(self.config.target).open(
                bundle, self.record, self.config.providers, self.threads
            )
            with Engine(bundle, self.record, session) as engine:
                yield engine, session

    @contextmanager
    def keeping(
        self, program: ExportedProgram, names: Sequence[str]
    ) -> Iterator[tuple[Engine, Session, tuple[Output, ...]]]:
        """An engine of a program that also returns the values of nodes, and these outputs."""
        request = lowering_request(self.model, self.config, program, Path())
        program, kept = with_kept(program, names, request.symbols)
        with self.opened(program, kept) as (engine, session):
            yield engine, session, kept


def boundaries(program: ExportedProgram) -> dict[str, tuple[str, ...]]:
    """Node name -> paths of the modules that the value leaves, innermost first; without values that
    the program returns already.
    """
    returned = {spec.arg.name for spec in program.graph_signature.output_specs}
    return {
        node.name: paths
        for node, paths in leaving(program).items()
        if node.graph is program.graph and node.name not in returned
        if isinstance(value(node), Tensor)
    }


def with_kept(
    program: ExportedProgram, names: Sequence[str], symbols: Mapping[str, str]
) -> tuple[ExportedProgram, tuple[Output, ...]]:
    """A copy of a program that returns the values of nodes, too, and what it returns in addition.

    Args:
        names: of the nodes.
        symbols: as in `LoweringRequest`.
    """
    copy = structural_copy(program)
    nodes = {node.name: node for node in copy.graph.nodes}
    add_outputs(copy, [nodes[name] for name in names])
    return copy, tuple(_output(nodes[name], symbols) for name in names)


def _output(node: Node, symbols: Mapping[str, str]) -> Output:
    found = value(node)
    shape = tuple(
        size if isinstance(size, int) else symbols.get(str(size), str(size)) for size in found.shape
    )
    return Output(name=f"kept_{node.name}", dtype=dtype_name(found.dtype), shape=shape)  # type: ignore[arg-type]


def keeping(
    request: LoweringRequest, modules: Sequence[str]
) -> tuple[LoweringRequest, tuple[Output, ...]]:
    """A request for an engine that gives what leaves modules, too, and what that is.

    Raises:
        UsageError: nothing leaves such a module in this program.
    """
    found = boundaries(request.program)
    known = {path for paths in found.values() for path in paths}
    for module in modules:
        if module not in known:
            near = difflib.get_close_matches(module, known, 3) or sorted(known)[:3]
            raise UsageError(
                f"--keep-output {module}: no value leaves such a module of the program",
                hint=f"Modules there are: {', '.join(near)}." if near else "",
            )
    names = [name for name, paths in found.items() if not set(modules).isdisjoint(paths)]
    if not names:
        return request, ()
    program, kept = with_kept(request.program, names, request.symbols)
    outputs = (*request.outputs, *(one.name for one in kept))
    return replace(request, program=program, outputs=outputs), kept
