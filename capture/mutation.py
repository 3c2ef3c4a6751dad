"""Find programs that write to their own state: an engine would drop the write without a word."""

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import CaptureError


def refuse_mutation(program: ExportedProgram) -> None:
    """Raise CaptureError when `program` writes to a parameter or buffer, also through a view.

    The signature does not tell before decomposition, so the in-place operators are looked at.
    """
    signature = program.graph_signature
    state = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    aliases: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in state:
            aliases[node.name] = state[node.name]
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if not isinstance(value, Node) or argument.alias_info is None:
                continue
            owner = aliases.get(value.name)
            if owner is not None and argument.alias_info.is_write:
                raise CaptureError(
                    f"the model writes to its own state: {node.target} changes {owner}",
                    hint="An engine keeps no state between calls: return the new value instead.",
                )
            if owner is not None:
                aliases[node.name] = owner
