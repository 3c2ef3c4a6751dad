"""What an op is, and how an op of ours is defined.

Those of torch's ops stand in `passes.ir.traits`, which is where both are asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Literal

import torch
from torch.library import CustomOpDef  # type: ignore[attr-defined] # public, and not in its __all__


class Trait(Flag):
    """What an op does, whatever it is given; those of one op are or-ed."""

    # Where the elements of the result come from.
    MOVES = auto()
    """They are elements of the first argument, at places that sizes alone decide."""
    IDENTITY = auto()
    """They are the first argument's, each in its place; the memory may be another."""
    RESHAPES = auto()
    """They are the first argument's in their order, in another shape."""
    PERMUTES = auto()
    """They are the first argument's, and so are the dimensions, in another order."""
    GATHERS = auto()
    """They are elements of the first argument, at places that another argument decides."""
    JOINS = auto()
    """They are the elements of all values of a list."""
    CASTS = auto()
    """They are the first argument's in another dtype, or on another device."""
    ELEMENTWISE = auto()
    """Each is computed from the elements in its place; arguments are broadcast."""
    ARITHMETIC = auto()
    """Elementwise: a sum, difference, product or quotient, or a choice between values."""
    CLAMPS = auto()
    """Elementwise: the first argument's within limits."""
    REDUCES = auto()
    """Each is computed from all elements along some dimensions."""
    ALONG = auto()
    """Happens along the dimensions that `dim` names, at each place along the others alike."""
    HEAVY = auto()
    """Each is a weighted sum over many elements: the work that a low compute dtype is for."""
    CONVOLVES = auto()
    """A convolution: a weighted sum over neighbors, whose second argument is its weight."""
    TRANSPOSED = auto()
    """Of a convolution: each element of the input goes into several of the result."""
    RECURS = auto()
    """A recurrent network over all steps of a sequence, whose third argument is its weights."""
    LITERAL = auto()
    """A number among the arguments becomes an element: the dtype of the result must hold it."""
    FILLS = auto()
    """Literal, and all numbers among the arguments are elements: nothing is computed with them."""
    METADATA = auto()
    """Of the first argument, size, dtype and device are read and no element."""
    CREATES = auto()
    """They are computed from sizes and numbers alone."""
    CHECKS = auto()
    """Gives nothing, and may fail when the program runs."""

    # What its numbers are like.
    EXACT = auto()
    """Nothing is rounded: the dtype of the arguments holds the result."""
    CORRECTLY_ROUNDED = auto()
    """Elementwise: each element is what IEEE 754 says, to the last bit, whatever computes it."""
    SENSITIVE = auto()
    """The result needs more precision than the input had: a source raises it beforehand."""
    WIDE = auto()
    """Torch computes it in 32 bits or more only: it has no kernel for 16-bit floats."""
    ACCUMULATES = auto()
    """A total or length, which outgrows fp16, as a small epsilon beside it does."""
    BOUNDED = auto()
    """No element has a magnitude above one."""
    GROWS = auto()
    """Of small numbers it may make large ones."""
    NOT_LARGER = auto()
    """No element has a larger magnitude than the one that it is computed from."""
    HOMOGENEOUS = auto()
    """A positive factor of the first argument is one of the result."""
    FULL_RANGE = auto()
    """The result fills the range of its dtype by construction: there is no headroom to measure."""

    # What it does with memory.
    ALIASES = auto()
    """The result may share memory with an argument."""
    WRITES = auto()
    """It writes into an argument."""
    STRIDE_BOUND = auto()
    """It fails on other strides than those it was made for, or reads other elements."""
    RANDOM = auto()
    """It may draw random numbers: two equal calls are two values."""
    UNFOLDABLE = auto()
    """Not to be computed beforehand: a quantized weight would be stored as large floats."""


NONE = Trait(0)
Family = Literal["onnx", "tensorrt"]


@dataclass(frozen=True)
class Own:
    """An op of ours."""

    definition: Callable[..., Any]
    """Computes it in torch."""
    traits: Trait
    form_of: Family | None
    """The only exporter that makes it, while it lowers a program; None: passes do."""


OWN: dict[torch._ops.OpOverload[Any, Any], Own] = {}
"""Every op of ours."""


def operator(
    traits: Trait = NONE, *, fake: Callable[..., Any], form_of: Family | None = None
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Define `enginecast::<name of the function>`, which computes it in torch for any float dtype,
    so that a program that holds it still runs and can be compared with eager.

    An unfoldable op is tagged as random, though it draws nothing: that is what keeps the constant
    folding of a backend from it.

    Args:
        fake: gives an empty tensor of the shape, dtype and strides of the result.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        tags = (torch.Tag.nondeterministic_seeded,) if Trait.UNFOLDABLE in traits else ()
        name = function.__name__
        made = torch.library.custom_op(f"enginecast::{name}", function, mutates_args=(), tags=tags)
        made.register_fake(fake)
        OWN[getattr(torch.ops.enginecast, name).default] = Own(function, traits, form_of)
        return made

    return define
