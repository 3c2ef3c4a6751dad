"""Find where a model's Python code decides by tensors, from its source, without running it.

The walk starts at `forward` with its tensor arguments, follows modules, helpers, decorators and
properties, and keeps account of what each value depends on.  What the config decides is known,
so branches that a model does not take are not looked at.
"""

import inspect
import logging
from collections.abc import Collection
from dataclasses import replace

from torch import nn

from enginecast.capture.findings import Finding, merge
from enginecast.capture.taint import CLEAN, Value, constant
from enginecast.capture.taint_frame import Arguments
from enginecast.capture.taint_walk import TooMuchError, Walker

logger = logging.getLogger(__name__)


def scan(module: nn.Module, tensors: Collection[str], *, is_eager: bool = False) -> list[Finding]:
    """Every line at which `module` decides by data, by shapes or dtypes, or changes itself.

    Args:
        module: in the mode in which it will run; its tensors may be on meta or fake.
        tensors: names of forward's arguments that are tensors; the others have their defaults.
        is_eager: look at the code that a plain run takes, rather than a capture, where code asks
            torch which of them it is.

    Returns:
        One finding a line, blocking ones first.  Code that has no source, and code that the scan
        does not get through, are findings of the kind "not-scanned".
    """
    walker = Walker(_paths(module), frozenset(), is_eager=is_eager)
    found = _round(walker, module, tensors)
    if walker.written:
        # What is written may hold anything when it is read; but a constant says the same always.
        second = Walker(_paths(module), frozenset(walker.written), is_eager=is_eager)
        _round(second, module, tensors)
        third = Walker(_paths(module), frozenset(second.changed), is_eager=is_eager)
        found = _round(third, module, tensors)
    # Counted is in how many modules a line is met: how often it runs, a scan cannot know.
    once = {(f.file, f.line, f.kind, f.tensor, f.module): f for f in found}
    return merge(replace(each, action=each.action or action(each)) for each in once.values())


def action(finding: Finding) -> str:
    """What is done about what the scan alone has found."""
    if not finding.is_blocking:
        return "none: captured"
    if finding.kind == "state":
        return "refused where the program keeps it"
    if finding.decides == "weights":
        return "baked: it depends on weights alone"
    return "captured at the example's size" if finding.decides == "shapes" else "rewritten"


def _paths(module: nn.Module) -> dict[int, str]:
    return {id(child): path for path, child in module.named_modules()}


def _round(walker: Walker, module: nn.Module, tensors: Collection[str]) -> list[Finding]:
    forward = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return [_given_up(module, forward, "forward has no signature")]
    given = {name: _argument(signature, name, tensors) for name in signature.parameters}
    named = {name: value for name, value in given.items() if value is not None}
    try:
        return walker.scan_module(module, Arguments(named=named))
    except TooMuchError:
        return [_given_up(module, forward, "there is too much code")]
    except Exception as error:  # a defect of the scan must not stop a capture
        logger.debug("the scan failed", exc_info=True)
        return [_given_up(module, forward, f"the scan failed: {type(error).__name__}: {error}")]


def _argument(signature: inspect.Signature, name: str, tensors: Collection[str]) -> Value | None:
    parameter = signature.parameters[name]
    if name in tensors:
        return Value(labels=frozenset({"inputs"}), tensor=True)
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    return CLEAN if parameter.default is parameter.empty else constant(parameter.default)


def _given_up(module: nn.Module, forward: object, reason: str) -> Finding:
    code = getattr(forward, "__code__", None)
    return Finding(
        kind="not-scanned",
        file=code.co_filename if code else "",
        line=code.co_firstlineno if code else 0,
        code="",
        function=f"{type(module).__qualname__}.forward",
        module="",
        tensor="",
        decides="unknown",
        witnesses=("scan",),
        action=f"not looked into: {reason}",
    )
