"""Which nodes may be removed if unused, or merged with equal ones."""

import operator
from typing import Any

import torch
from torch.fx import Node

from enginecast import library_names
from enginecast.passes.ir.blocks import blocks, is_structured
from enginecast.passes.ir.traits import Trait, has

aten = library_names.aten
own = torch.ops.enginecast
"""The namespace of enginecast's own ops."""
WITHOUT_NOISE = "Make the noise an input, or switch it off."
"""Hint for a model that draws random numbers."""


def is_metadata_check(node: Node) -> bool:
    """Whether a node only asserts a size, stride or dtype and computes nothing."""
    return has(node, Trait.CHECKS | Trait.METADATA)


def is_pure(node: Node) -> bool:
    """Whether a node may be removed if unused, and merged with an equal one."""
    if node.op != "call_function" or has(node, Trait.CHECKS, Trait.WRITES):
        return False
    if is_structured(node):
        inner = (each for block in blocks(node) for each in block.module.graph.nodes)
        return all(is_pure(each) for each in inner if each.op == "call_function")
    # fx calls every op that can draw random numbers impure, whether or not this call draws any.
    draws_nothing = _draws_nothing(node) or has(node, Trait.UNFOLDABLE)
    return draws_nothing or node.target is operator.getitem or not node.is_impure()


def is_random(node: Node) -> bool:
    """Whether an op may draw random numbers, so that equal calls return different values."""
    return has(node, Trait.RANDOM)


def draws(node: Node) -> bool:
    """Whether a call draws random numbers that an output of its graph depends on."""
    if not is_random(node) or _draws_nothing(node):
        return False
    waiting, seen = [node], {node}
    while waiting:
        users = [user for user in waiting.pop().users if user not in seen]
        if any(user.op == "output" for user in users):
            return True
        waiting += users
        seen.update(users)
    return False


def named_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, in the order of its op, with the op's defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]  # of an OpOverload
    names = [each.name for each in schema]
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: given[name] for name in names if name in given}


def _draws_nothing(node: Node) -> bool:
    """Whether a call of a random op draws nothing: dropout in eval mode, or with rate 0."""
    if not is_random(node):
        return False
    given = named_arguments(node)
    in_training = given.get("train", given.get("training", True))
    return in_training is False or 0.0 in (given.get("p"), given.get("dropout_p"))


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with an argument."""
    if node.op != "call_function":
        return False
    return has(node, Trait.ALIASES) or not isinstance(node.target, torch._ops.OpOverload)
