"""Remove assertions from a program: an engine has no way to raise an error.

    before:  %_ = aten._assert_scalar.default(%nonzero, "...")      after:  (gone)

Verification has run them on every case before, so the promise is `exact`.  What is lost is said in
the note of the site: a later input that breaks one gets a result all the same.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.effects import is_metadata_check
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.rules import rewrite_sites
from enginecast.passes.ir.source import checked, source_line
from enginecast.passes.ir.traits import Trait, has


@dataclass(frozen=True)
class DropAssertions(GraphPass):
    """Erase all assertions, and list those that a user should know of: not those of dtypes, and not
    the bounds that torch itself derives for a size that an op such as nonzero decides.
    """

    name: ClassVar[str] = "drop-assertions"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        def is_assertion(node: Node) -> bool:
            return has(node, Trait.CHECKS) and not is_metadata_check(node)

        def drop(node: Node) -> str:
            said = [argument for argument in node.args if isinstance(argument, str)]
            condition = f" ({checked(said[0])})" if said else ""
            place = source_line(node) or node.name
            note = f"the assertion at {place}{condition} is not in the engine"
            note = "" if _is_derived(node) else note
            program.graph.erase_node(node)
            return note

        return rewrite_sites(program, context, is_assertion, drop)


def _is_derived(node: Node) -> bool:
    """Whether a check is of sizes alone: nothing that the input's values decide directly."""
    if is_call(node, aten._assert_async.msg, aten._assert_async.default):
        return False
    if not is_call(node, aten._assert_scalar.default, aten.sym_constrain_range.default):
        return True
    waiting, seen = list(node.all_input_nodes), set()
    while waiting:
        source = waiting.pop()
        if source in seen or source.target is aten.sym_size.int:
            continue
        seen.add(source)
        if source.target in (aten.item.default, aten._local_scalar_dense.default):
            return False
        waiting += source.all_input_nodes
    return True
