"""Modules that a user wants left alone, put into the options of a pipeline's passes."""

import re
from collections.abc import Mapping
from dataclasses import replace

from enginecast.errors import UsageError
from enginecast.passes.base import Pass
from enginecast.passes.options import spec_from_pass
from enginecast.passes.pipeline import build
from enginecast.passes.plan_fp8 import PlanFp8
from enginecast.passes.plan_int8 import PlanInt8
from enginecast.passes.spec import render
from enginecast.passes.unify_dtype import UnifyDtype

SKIP_FIELDS: Mapping[type[Pass], tuple[str, str]] = {
    UnifyDtype: ("keep", "keep_classes"),
    PlanFp8: ("skip_modules_pattern", "skip_modules_classes"),
    PlanInt8: ("skip_modules_pattern", "skip_modules_classes"),
}
"""Passes that leave modules alone on request, and the options that say so."""


def keeping(text: str, keep: tuple[str, ...], keep_classes: tuple[str, ...]) -> str:
    """The pipeline with --skip-modules-pattern and --skip-modules-classes in its unify-dtype."""
    if not keep and not keep_classes:
        return text
    for pattern in keep:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"--skip-modules-pattern {pattern}: not a regular expression: {error}"
            ) from error
    passes = build(text)
    kinds = {type(pass_) for pass_ in passes} & set(SKIP_FIELDS)
    # A module that is not quantised is computed in the dtype that all else is computed in.
    kinds = kinds - {UnifyDtype} or kinds
    if not kinds:
        raise UsageError(
            "--skip-modules-pattern and --skip-modules-classes keep modules in fp32, and nothing"
            " else is computed in this pipeline",
            hint="They go with --precision fp16, bf16, mixed, int8 or fp8.",
        )
    passes = tuple(
        _with_more(p, dict(zip(SKIP_FIELDS[type(p)], (keep, keep_classes), strict=True)))
        if type(p) in kinds
        else p
        for p in passes
    )
    return render([spec_from_pass(p) for p in passes])


def _with_more(pass_: Pass, more: Mapping[str, tuple[str, ...]]) -> Pass:
    return replace(pass_, **{name: (*getattr(pass_, name), *new) for name, new in more.items()})
