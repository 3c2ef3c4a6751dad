"""Find where a value is divided by its root mean square in plain ops."""

from torch.fx import Node

from enginecast.passes.ir.edit import aten, first_input, shape_of
from enginecast.passes.ir.match import is_call, real_users, reduces_last_dim
from enginecast.passes.ir.pattern import Number, Pattern, Value, casts, either, op, pattern

_square, _mean = op(aten.square.default), op(aten.mean.dim)
_sqrt, _rsqrt = op(aten.sqrt.default), op(aten.rsqrt.default)
_reciprocal = op(aten.reciprocal.default)

NO_ROOT = "no reciprocal root over mean + epsilon follows the mean of squares"
NO_PRODUCT = "{op} reads the reciprocal root, expected a product with the value"
NO_QUOTIENT = "no division of the measured value by the root follows"


def _squared(x: Value) -> Pattern:
    measured = casts(x).named("measured")
    return either(measured**2, measured * measured, _square(measured)).named("square")


_SQUARE = pattern(_squared)


def _other_dims(mean: Node) -> str:
    return f"the mean is over dims {mean.args[1]}, expected the last one, kept"


@pattern
def normalized(x: Value, epsilon: Number) -> Pattern:
    """Pattern of x, or a cast of it, over its root mean square; the site is the mean.

    Binds square, mean, plus (adds epsilon) and root, which is the root of the sum or its
    reciprocal; measured is what is squared, the pattern's root what the measured value became.
    """
    mean = _mean(_squared(x)).where(reduces_last_dim, _other_dims).named("mean").site()
    plus = (mean + epsilon).otherwise(NO_ROOT).named("plus")
    rsqrt = _rsqrt(plus).otherwise(NO_ROOT).named("root")
    sqrt = _sqrt(plus).otherwise(NO_ROOT).named("root")
    inverse = _reciprocal(sqrt).otherwise(NO_QUOTIENT)
    value = casts(x.otherwise("the product normalizes another value than the mean measured"))
    return either(
        (value * rsqrt).otherwise(NO_PRODUCT),
        (value * inverse).otherwise("{op} reads the reciprocal root, expected a product"),
        (casts(x.otherwise(NO_QUOTIENT)) / sqrt).otherwise(NO_QUOTIENT),
    ).named("scaled")


def is_statistic(node: Node) -> bool:
    """Whether a node is a mean of squares, not of single numbers, followed by a root."""
    if not is_call(node, aten.mean.dim) or _SQUARE.find(node.args[0]) is None:
        return False
    if not shape_of(first_input(node)):
        return False
    behind = [user for plus in real_users(node) for user in real_users(plus)]
    return any(is_call(user, aten.rsqrt.default, aten.sqrt.default) for user in behind)
