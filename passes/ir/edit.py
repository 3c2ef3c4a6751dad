"""Edits that every pass needs: insert with meta, erase, add weights, copy without weights."""

import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from enginecast import library_names
from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.blocks import copy_module
from enginecast.passes.ir.deferred_weights import (
    DEFERRED_KEY,
    deferred_weight,
    deferred_weights,
)
from enginecast.passes.ir.effects import is_metadata_check, is_pure
from enginecast.passes.ir.traits import Trait, has

aten = library_names.aten

SCALE = "enginecast_scale"
"""Key of a node's metadata; see `scaled_values`."""

WEIGHT_KINDS = frozenset({InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR})


def value(node: Node) -> Any:
    """The fake value of a node: a FakeTensor, a SymInt, or a tuple of them."""
    return node.meta.get("val")


def dtype_of(node: object) -> torch.dtype | None:
    """The dtype of a tensor-valued node, or of a tuple's first float; None for anything else."""
    fake = value(node) if isinstance(node, Node) else None
    if isinstance(fake, tuple | list):
        floats = [f for f in fake if isinstance(f, Tensor) and f.is_floating_point()]
        fake = floats[0] if floats else None
    return fake.dtype if isinstance(fake, Tensor) else None


def is_float(node: object) -> bool:
    """Whether a node is of a dtype that floats are computed in; what is in fp8 is only stored."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point and dtype.itemsize > 1


def is_complex(node: object) -> bool:
    """Whether a node is a complex tensor."""
    fake = value(node) if isinstance(node, Node) else None
    return isinstance(fake, Tensor) and fake.is_complex()


def first_input(node: Node) -> Node:
    """The first argument of an op whose first argument is a tensor."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments; fx types each as anything that some op accepts."""
    return node.args


def shape_of(node: Node) -> tuple[Any, ...]:
    """The symbolic shape of a tensor-valued node."""
    return tuple(value(node).shape)


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are equal for every allowed input, decided without adding a guard."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return str(left) == str(right)


def same_shape(left: Iterable[Any], right: Iterable[Any]) -> bool:
    left, right = tuple(left), tuple(right)
    return len(left) == len(right) and all(map(same_size, left, right))


def weight_specs(program: ProgramView) -> dict[str, InputSpec]:
    """Placeholder name -> input spec, for parameters, buffers and lifted constant tensors."""
    return {
        spec.arg.name: spec
        for spec in program.graph_signature.input_specs
        if spec.kind in WEIGHT_KINDS
    }


def weight_tensor(program: ProgramView, spec: InputSpec) -> Tensor:
    """The tensor behind a parameter, buffer or constant placeholder; a deferred one is computed."""
    assert spec.target is not None
    deferred = deferred_weight(program, spec.target)
    if deferred is not None:
        return deferred.compute()
    tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
    assert isinstance(tensor, Tensor)
    return tensor


def input_names(program: ExportedProgram) -> list[str]:
    """The names of the tensors that a program is called with, in order."""
    return [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument)
    ]


def weight_expressions(program: ProgramView) -> set[Node]:
    """Every node whose value depends only on weights, including their placeholders.

    A node that reads a quantized weight is excluded: its value would be stored in place of the
    quantized weight.
    """
    weights = weight_specs(program)
    expressions: set[Node] = set()
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        if node.name in weights or (
            sources
            and expressions.issuperset(sources)
            and is_pure(node)
            and not has(node, Trait.UNFOLDABLE)
        ):
            expressions.add(node)
    return expressions


def fake_mode(program: ProgramView) -> Any:
    """The FakeTensorMode of the program's fake values."""
    found = map(value, program.graph.nodes)
    fake = torch._subclasses.fake_tensor.FakeTensor
    return next(tensor.fake_mode for tensor in found if isinstance(tensor, fake))


def insert(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: Node,
    name: str | None = None,
    replaces: bool = False,
) -> Node:
    """Add a call at the insertion point, with the source location of `like` and a computed fake
    value.

    Args:
        replaces: whether the call returns the same value as `like`, so that its fake value is
            reused: computing one with symbolic sizes is the most expensive step here.
    """
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    take_place(node, like)
    node.meta["val"] = value(like) if replaces else evaluate_fake(node)
    return node


def take_place(node: Node, like: Node) -> None:
    """Give a node the module, source line and scale of `like`."""
    for key in ("nn_module_stack", "stack_trace", SCALE):
        if key in like.meta:
            node.meta[key] = like.meta[key]


def evaluate_fake(node: Node, known: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """A node's fake value, from those of its arguments, or from those of `known` instead."""
    args, kwargs = torch.fx.map_arg(
        (node.args, node.kwargs), lambda n: known[n] if n in known else n.meta["val"]
    )
    modes = [
        found.fake_mode
        for source in node.all_input_nodes
        if isinstance(found := value(source), torch._subclasses.fake_tensor.FakeTensor)
    ]
    assert callable(node.target)
    with torch.no_grad():
        if not modes:
            return node.target(*args, **kwargs)
        # Without the second, kernels in C++ read sizes as numbers, and fix those that vary.
        with modes[0], enable_python_dispatcher():
            return node.target(*args, **kwargs)


def erase_dead(graph: Graph) -> int:
    """Erase unused pure nodes, and metadata assertions that would keep a dead value alive."""
    erased = 0
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:  # the block of an op that went
            graph.erase_node(node)
        if node.op != "call_function":
            continue
        if is_pure(node) and all(map(is_metadata_check, node.users)):
            for user in list(node.users):
                graph.erase_node(user)
                erased += 1
        if not node.users and is_pure(node):
            graph.erase_node(node)
            erased += 1
    return erased


def drop_unused_weights(program: ProgramView) -> int:
    """Remove the placeholders of unused weights, so that they are not stored."""
    specs = weight_specs(program)
    dead = {
        node.name: node
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in specs and not node.users
    }
    for node in dead.values():
        program.graph.erase_node(node)
    signature = program.graph_signature
    signature.input_specs = [s for s in signature.input_specs if s.arg.name not in dead]
    used = {s.target for s in signature.input_specs}
    for name in [specs[n].target for n in dead]:
        if name is not None and name not in used:
            program.state_dict.pop(name, None)
            program.constants.pop(name, None)
    return len(dead)


def add_weight(program: ProgramView, name: str, tensor: Tensor, kind: InputKind) -> Node:
    """Add a weight to the program: a placeholder, its input spec, and its tensor.

    Args:
        name: dotted name, new in the program.
        tensor: the value; shared, not copied.
        kind: PARAMETER, BUFFER or CONSTANT_TENSOR.
    """
    return add_weights(program, {name: tensor}, kind)[0]


def add_weights(
    program: ProgramView, tensors: Mapping[str, Tensor], kind: InputKind
) -> tuple[Node, ...]:
    """Add weights of one kind, in order; see `add_weight`."""
    graph, specs = program.graph, program.graph_signature.input_specs
    # As many placeholders are there as specs, in the same order.
    position = next(
        (i for i, spec in enumerate(specs) if spec.kind not in WEIGHT_KINDS), len(specs)
    )
    persistent = True if kind is InputKind.BUFFER else None
    # ProgramView has no public way to add to its state.
    held = program.constants if kind is InputKind.CONSTANT_TENSOR else program.state_dict
    mode, nodes, added = fake_mode(program), [], []
    with graph.inserting_before(next(itertools.islice(graph.nodes, position, None))):
        for name, tensor in tensors.items():
            node = graph.placeholder("w_" + name.replace(".", "_").lower())
            node.target = node.name  # the name may be taken, and arguments have names of their own
            node.meta["val"] = mode.from_tensor(tensor.detach(), static_shapes=True)
            added.append(InputSpec(kind, TensorArgument(name=node.name), name, persistent))
            held[name] = tensor
            nodes.append(node)
    program.graph_signature.input_specs = [*specs[:position], *added, *specs[position:]]
    return tuple(nodes)


def free_name(program: ProgramView, name: str) -> str:
    """The name, numbered if it is taken: a copied graph keeps its node names."""
    return next(free_names(program, name))


def free_names(program: ProgramView, name: str) -> Iterator[str]:
    """The name and numbered variants of it, without those taken when iteration begins."""
    taken = {spec.target for spec in program.graph_signature.input_specs}
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    if hasattr(torch.nn.Module, name.rpartition(".")[2]):  # `to`: torch refuses it as a buffer
        taken.add(name)
    yield from (free for free in itertools.chain([name], numbered) if free not in taken)


def hoist_before(node: Node, anchor: Node, weights: set[Node]) -> None:
    """Move a weight expression before `anchor`; it depends on placeholders alone."""
    if node.op == "placeholder" or node not in weights or node < anchor:
        return
    for source in node.all_input_nodes:
        hoist_before(source, anchor, weights)
    anchor.prepend(node)


def insert_item(graph: torch.fx.Graph, source: Node, index: int, *, like: Node) -> Node:
    """The index-th result of an op with several."""
    node = graph.create_node("call_function", operator.getitem, (source, index))
    take_place(node, like)
    node.meta["val"] = value(source)[index]
    return node


@contextmanager
def tracked_outputs(program: ProgramView) -> Iterator[None]:
    """While nodes are replaced in the block, keep the output names in the signature up to date.

    The hook is private to torch; no public call does this. Torch's own hook (`get_replace_hook`)
    also renames the input if an output is an input or a weight.
    """
    specs = program.graph_signature.output_specs

    def rename(old: Node, new: str, user: Node) -> None:
        if user.op != "output":
            return
        for spec in specs:
            if getattr(spec.arg, "name", None) == old.name:
                spec.arg.name = new

    with program.graph_module._set_replace_hook(rename):
        yield


def structural_copy(program: ExportedProgram) -> ExportedProgram:
    """Copy graph and signature, share every weight.  (`copy.deepcopy` copies the weights, too.)"""
    module = copy_module(program.graph_module)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=dict(program.range_constraints),
        module_call_graph=copy.copy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=dict(program.constants),
        verifiers=program.verifiers,
    )


def with_weights(program: ExportedProgram) -> ExportedProgram:
    """A copy with all of its weights in its state: deferred ones are computed."""
    copied = structural_copy(program)
    for target, weight in deferred_weights(program).items():
        copied._state_dict[target] = torch.nn.Parameter(weight.compute(), requires_grad=False)
    copied.graph_module.meta.pop(DEFERRED_KEY, None)
    return copied


def weight_value(program: ProgramView, node: Node) -> Any:
    """The value of a weight expression; a stored weight is shared, not copied."""
    specs = weight_specs(program)

    def load(source: Node) -> Any:
        if source.op == "placeholder":
            return weight_tensor(program, specs[source.name]).detach()
        args = torch.fx.map_arg(source.args, load)
        kwargs = torch.fx.map_arg(source.kwargs, load)
        assert callable(source.target)
        with torch.no_grad():
            return source.target(*args, **kwargs)

    return load(node)


def add_outputs(program: ExportedProgram, added: Sequence[Node]) -> None:
    """Return the values of nodes, too, after all that a program returns."""
    output = program.graph.output_node()
    values = output.args[0]
    assert isinstance(values, tuple | list)
    output.args = ((*values, *added),)
    program.graph_signature.output_specs += [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in added
    ]
    # A lowering that decomposes the program calls it, and takes its outputs apart by this.
    count = sum(
        spec.kind is OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs
    )
    entry, *modules = program.module_call_graph
    if entry.signature is not None:
        spec = pytree.tree_structure(tuple(range(count)))
        entry = replace(entry, signature=replace(entry.signature, outputs=[], out_spec=spec))
    program._module_call_graph = [entry, *modules]
    program.graph_module.recompile()
