"""Which passes there are: ours by name, third parties' by entry point; classes load on use."""

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from enginecast.errors import SpecError

if TYPE_CHECKING:
    from enginecast.passes.base import Pass

GROUP = "enginecast.passes"
"""Entry-point group by which other packages add passes."""

PASSES: Mapping[str, str] = {
    "rescale-residual": "enginecast.passes.rescale_residual:RescaleResidual",
    "canonicalize": "enginecast.passes.canonicalize:Canonicalize",
    "unify-dtype": "enginecast.passes.unify_dtype:UnifyDtype",
    "exact-position-buckets": "enginecast.passes.exact_position_buckets:ExactPositionBuckets",
    "fuse-rms-norm": "enginecast.passes.fuse_rms_norm:FuseRmsNorm",
    "fuse-gelu": "enginecast.passes.fuse_gelu:FuseGelu",
    "fuse-attention": "enginecast.passes.fuse_attention:FuseAttention",
    "fuse-skip-norm": "enginecast.passes.fuse_skip_norm:FuseSkipNorm",
    "merge-linears": "enginecast.passes.merge_linears:MergeLinears",
    "smooth-outliers": "enginecast.passes.smooth_outliers:SmoothOutliers",
    "plan-fp8": "enginecast.passes.plan_fp8:PlanFp8",
    "plan-int8": "enginecast.passes.plan_int8:PlanInt8",
    "fp8-matmul": "enginecast.passes.fp8_matmul:Fp8Matmul",
    "int8-matmul": "enginecast.passes.int8_matmul:Int8Matmul",
}


def known_passes() -> dict[str, str]:
    """Name -> "module:Class" of every pass, ours first; imports none of them.

    Raises:
        SpecError: an installed package names a pass that exists already.
    """
    known = dict(PASSES)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name in known:
            package = entry.dist.name if entry.dist else "a package without a name"
            raise SpecError(
                f"two passes are called '{entry.name}': {known[entry.name]} and {entry.value}",
                hint=f"The second comes from {package}; uninstall it or have it rename its pass.",
            )
        known[entry.name] = entry.value
    return known


def pass_class(name: str) -> type["Pass"]:
    """The class of a pass.

    Raises:
        SpecError: no pass has this name, or its class cannot be loaded or is no such pass.
    """
    known = known_passes()
    if name not in known:
        close = difflib.get_close_matches(name, known)
        meant = f"Did you mean {' or '.join(map(repr, close))}?  " if close else ""
        raise SpecError(f"unknown pass '{name}'", hint=f"{meant}Known: {', '.join(known)}.")
    return _load(name, known[name])


def _load(name: str, where: str) -> type["Pass"]:
    from enginecast.passes.base import Pass  # here, so that listing names does not import torch

    module, _, attribute = where.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"pass '{name}' cannot be loaded from {where}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise SpecError(f"pass '{name}': {where} is not a subclass of enginecast.passes.base.Pass")
    own_name = getattr(found, "name", None)  # the base class and half-written passes have none
    if own_name != name:
        raise SpecError(f"pass '{name}': {where} calls itself {own_name!r}")
    return found
