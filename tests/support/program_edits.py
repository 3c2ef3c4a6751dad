"""Right and wrong rewrites of the small encoder's program, and a reference to judge them by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from small_programs import NAMES, Encoder, cases, encoder, program
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import insert
from enginecast.passes.ir.source import module_path
from enginecast.runtime.bundle.manifest import Where
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.reference import Reference

aten = torch.ops.aten
Edit = Callable[[ExportedProgram], None]
MASKED = frozenset({"hidden"})
WHERE = Where(provider="", device="cpu", versions={})


@dataclass(frozen=True)
class EditPass(Pass):
    """Does what a test wants, under one promise or another."""

    name: ClassVar[str] = "edit"
    edit: Edit = lambda program: None

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        self.edit(program)
        return [Site("node", "", "")]


@dataclass(frozen=True)
class Exact(EditPass):
    promise: ClassVar[Promise] = "exact"


@dataclass(frozen=True)
class Reordered(EditPass):
    promise: ClassVar[Promise] = "reordered"


def find(program: ExportedProgram, target: object, module: str) -> Node:
    nodes: list[Node] = list(program.graph.nodes)
    return next(n for n in nodes if n.target is target and module_path(n) == module)


def scale_after(node: Node, factor: float) -> None:
    with node.graph.inserting_after(node):
        scaled = insert(node.graph, aten.mul.Tensor, (node, factor), like=node)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def change_one_bit(program: ExportedProgram) -> None:
    scale_after(find(program, aten.layer_norm.default, "blocks.1.norm"), 1 + 2.0**-23)


def change_epsilon(program: ExportedProgram) -> None:
    norm = find(program, aten.layer_norm.default, "blocks.0.norm")
    norm.args = (*norm.args[:4], 1e-3, *norm.args[5:])


def perturb_one_weight(program: ExportedProgram) -> None:
    weight = program.state_dict["blocks.1.second.weight"].detach().clone()
    weight[3, 5] += 1e-2
    program.state_dict["blocks.1.second.weight"] = nn.Parameter(weight, requires_grad=False)


def drop_the_mask(program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        if node.target is aten.unsqueeze.default and node.args[0].name == "attention_mask":
            with node.graph.inserting_after(node):
                ones = insert(node.graph, aten.ones_like.default, (node,), like=node)
            node.replace_all_uses_with(ones, delete_user_cb=lambda user, new=ones: user is not new)


def sum_in_another_order(program: ExportedProgram) -> None:
    """x @ w + b as b + x @ w over reversed channels: the same steps, other roundings."""
    for node in list(program.graph.nodes):
        if node.target is aten.linear.default:
            x, weight, bias = node.args
            with node.graph.inserting_before(node):
                left = insert(node.graph, aten.flip.default, (x, [-1]), like=node)
                right = insert(node.graph, aten.flip.default, (weight, [-1]), like=node)
                product = insert(node.graph, aten.linear.default, (left, right), like=node)
                result = insert(node.graph, aten.add.Tensor, (product, bias), like=node)
            node.replace_all_uses_with(result)
            node.graph.erase_node(node)


def forward(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(module(**inputs))


@cache
def low_reference(dtype: str, *, scale: float = 1.0) -> Reference:
    def eager(to: torch.dtype) -> Encoder:
        return encoder(scale=scale).to(to)

    return make_reference(
        program(encoder(scale=scale)),
        eager,
        cases(),
        dtype=dtype,
        names=NAMES,
        forward=forward,
        mask_input="attention_mask",
    )
