"""Which nodes may be removed if unused, or merged with equal ones."""

import operator

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
        inner = (found for block in blocks(node) for found in block.module.graph.nodes)
        return all(is_pure(found) for found in inner if found.op == "call_function")
    # fx calls every op that can draw random numbers impure, whether or not this call draws any.
    draws_nothing = _draws_nothing(node) or has(node, Trait.UNFOLDABLE)
    return draws_nothing or node.target is operator.getitem or not node.is_impure()


def is_random(node: Node) -> bool:
    """Whether an op may draw random numbers, so that equal calls return different values."""
    return has(node, Trait.RANDOM)


def draws(node: Node) -> bool:
    """Whether a call draws random numbers that an output of its graph depends on."""
    return is_random(node) and not _draws_nothing(node) and _is_read(node)


def _is_read(node: Node) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        users = [user for user in waiting.pop().users if user not in seen]
        if any(user.op == "output" for user in users):
            return True
        waiting += users
        seen.update(users)
    return False


def _draws_nothing(node: Node) -> bool:
    """Whether a call of a random op draws nothing: dropout in eval mode, or with rate 0."""
    if not is_random(node):
        return False
    schema = node.target._schema  # type: ignore[union-attr]  # only an OpOverload is random
    names = [argument.name for argument in schema.arguments]
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    in_training = given.get("train", given.get("training", True))
    return in_training is False or 0.0 in (given.get("p"), given.get("dropout_p"))


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with an argument."""
    if node.op != "call_function":
        return False
    return has(node, Trait.ALIASES) or not isinstance(node.target, torch._ops.OpOverload)
