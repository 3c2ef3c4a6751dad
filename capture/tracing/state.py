"""What a forward leaves behind on its module, and whether the next call goes differently for it.

torch.export refuses or shows a write to a buffer.  A Python attribute is baked without a word: a
counter that scales the result is a constant in the program.  So eager is called twice with equal
inputs, and its modules are looked at in between.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.errors import CaptureError, EnginecastError

Outputs = Mapping[str, Tensor]
Call = Callable[[nn.Module, Mapping[str, Tensor]], Outputs]

SAME = 1e-5
"""Relative L2 distance of two calls with equal inputs: kernels that add in another order from call
to call stay far below it in fp32."""
MOST_ITEMS = 1000
"""Items of a container that are looked at."""
_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: its hooks and registries."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Change:
    """An attribute that a call left different."""

    name: str
    """Dotted, from the model: `encoder.calls`."""
    how: str
    """Such as `was 0, is 1`."""
    place: str
    """`file:line` of the code that writes it; empty when that was not found."""

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.name}{where} ({self.how})"


class CalledTwice:
    """Calls a module; before it does so for the first time, calls it twice to see what it keeps.

    Args:
        call: runs a module on inputs and names its outputs.
        inputs: what is called twice; small ones, for it costs two runs.
    """

    def __init__(self, call: Call, inputs: Mapping[str, Tensor]) -> None:
        self._call = call
        self._inputs = inputs
        self._is_done = False
        self.notes: tuple[str, ...] = ()
        """What the module's own code changes without another result, as sentences."""

    def __call__(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> Outputs:
        """Run `module` on `inputs`.

        Raises:
            CaptureError: a second call with equal inputs gives another result.
        """
        if not self._is_done:
            self._is_done = True
            self._look(module)
        return self._call(module, inputs)

    def _look(self, module: nn.Module) -> None:
        before = _state(module)
        try:
            first = self._call(module, _copies(self._inputs))
            changes = list(_changes(module, before))
            second = self._call(module, _copies(self._inputs))
        except EnginecastError:
            raise
        except Exception:  # it will be told when the case is run for its own sake
            return
        for name in first:
            if _differ(first[name], second[name]):
                _refuse(changes, name)
        self.notes = tuple(
            f"forward changes {change}; an engine keeps no state, and the result is the same"
            for change in changes
            if change.place  # else some library's bookkeeping
        )


def _refuse(changes: list[Change], output: str) -> None:
    if changes:
        raise CaptureError(
            "the model keeps state that changes its result: forward changes "
            f"{'; '.join(map(str, changes[:4]))}, and a second call with equal inputs gives "
            f"another {output!r}",
            hint="An engine keeps no state between calls: make it an input and return the new "
            "value.",
        )
    raise CaptureError(
        f"two calls with equal inputs give different values of {output!r}: the model draws random "
        "numbers, or keeps state outside of its modules",
        hint="Make the noise an input, or switch it off.",
    )


def _state(module: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    return {
        name: (part, {key: _mark(value) for key, value in _attributes(part)})
        for name, part in module.named_modules()
    }


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((key, value) for key, value in vars(module).items() if key not in _OWN)
    yield "training", module.training
    yield from module._buffers.items()
    yield from module._parameters.items()


def _mark(value: Any, depth: int = 2) -> Any:
    """What shows that a value was replaced or written into; the value itself, of plain ones."""
    if isinstance(value, Tensor):
        return value, value._version
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        items = [_mark(item, depth - 1) for item in list(value)[:MOST_ITEMS]]
        return type(value), len(value), items
    if isinstance(value, dict) and depth:
        items = [(key, _mark(item, depth - 1)) for key, item in list(value.items())[:MOST_ITEMS]]
        return type(value), len(value), items
    return id(value)


def _changes(
    module: nn.Module, before: Mapping[str, tuple[nn.Module, dict[str, Any]]]
) -> Iterator[Change]:
    for name, part in module.named_modules():
        known, marks = before.get(name, (part, {}))
        for key, value in _attributes(part):
            if known is part and key in marks and _same(marks[key], _mark(value)):
                continue
            how = _how(marks[key], value) if key in marks else f"was not set, {_now(value)}"
            yield Change(f"{name}.{key}".lstrip("."), how, _place(part, key))


def _same(left: Any, right: Any) -> bool:
    """Whether two marks are equal; a tensor that was replaced by an equal one did not change."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left is right or _is_equal(left, right)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        if len(left) != len(right):
            return False
        if len(left) == 2 and isinstance(left[0], Tensor) and isinstance(right[0], Tensor):
            versions = left[0] is not right[0] or left[1] == right[1]
            return versions and _same(left[0], right[0])
        return all(_same(one, other) for one, other in zip(left, right, strict=True))
    return bool(type(left) is type(right) and left == right)


def _is_equal(left: Tensor, right: Tensor) -> bool:
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and left.device == right.device and torch.equal(left, right)


def _how(mark: Any, value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, (list, dict, set, tuple)) and isinstance(mark, tuple) and len(mark) == 3:
        return f"had {mark[1]} items, has {len(value)}"
    if isinstance(value, _PLAIN) and isinstance(mark, _PLAIN):
        return f"was {mark!r}, {_now(value)}"
    return f"a {type(value).__name__}"


def _now(value: Any) -> str:
    return f"is {value!r}" if isinstance(value, _PLAIN) else f"is a {type(value).__name__}"


def _place(module: nn.Module, key: str) -> str:
    """The line that writes `self.KEY`, outside of __init__, in the classes of a module."""
    for kind in type(module).__mro__:
        if kind in (nn.Module, object):
            continue
        try:
            lines, first = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name != "__init__":
                found = [
                    n.lineno
                    for n in ast.walk(function)
                    if isinstance(n, ast.stmt) and _writes(n, key)
                ]
                if found:
                    return f"{file}:{first + min(found) - 1}"
    return ""


def _writes(node: ast.AST, key: str) -> bool:
    """Whether a statement assigns `self.KEY`, or calls one of its methods for what that does."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and _is_own(function.value, key)
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    return any(_is_own(part, key) for target in targets for part in ast.walk(target))


def _is_own(node: ast.AST, key: str) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != key:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _differ(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return True
    if torch.equal(left, right):
        return False
    one, other = left.double().nan_to_num(), right.double().nan_to_num()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return True
    return bool((one - other).norm() > SAME * one.norm())


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
