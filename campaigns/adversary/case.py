"""What a case is, and how a file lists its cases."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from enginecast.capture.tracing.attempt import Fallback

Expected = Literal["right", "refused", "either"]
"""What must happen: published and right, not published, or any but published and wrong."""


@dataclass(frozen=True)
class Case:
    """A module, its example, and what an export must make of it."""

    group: str
    name: str
    module: Callable[[], nn.Module]
    example: Mapping[str, Tensor]
    expected: Expected
    dynamic: tuple[str, ...] = ()
    precision: str = "fp32"
    target: str = "onnxruntime"
    fallback: Fallback = "torchscript"
    floor: float = 0.0
    """A difference that is none: a rounding of what the result is the small difference of."""
    is_quick: bool = False
    """Whether the default test run has it."""

    def make(self) -> nn.Module:
        """The module, the same at every call."""
        torch.manual_seed(0)
        return self.module()

    def inputs(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.example.items()}


@dataclass
class Group:
    """The cases of one class."""

    name: str
    title: str
    cases: list[Case] = field(default_factory=list)

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def right(self, name: str, module: Callable[..., Any], **rest: Any) -> None:
        """It must be published, and be right."""
        self._add(name, module, "right", rest)

    def refused(self, name: str, module: Callable[..., Any], **rest: Any) -> None:
        """It must not be published."""
        self._add(name, module, "refused", rest)

    def either(self, name: str, module: Callable[..., Any], **rest: Any) -> None:
        """Published and right, or not published."""
        self._add(name, module, "either", rest)

    def _add(
        self, name: str, module: Callable[..., Any], expected: Expected, rest: dict[str, Any]
    ) -> None:
        options = ("dynamic", "precision", "target", "fallback", "floor", "is_quick")
        kept = {key: rest.pop(key) for key in options if key in rest}
        self.cases.append(Case(self.name, name, _maker(name, module), rest, expected, **kept))


def _maker(name: str, module: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A class of modules, or a partial of one, as it is; of a function, a class with it as forward."""
    if isinstance(module, type | partial):
        return module
    title = "".join(part for part in name.title() if part.isalnum())
    made: type[nn.Module] = type(f"M{title}", (nn.Module,), {"forward": module})
    return made


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Values of a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    """Values between 0 and 1."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def whole(*shape: int, low: int = 0, high: int = 9, seed: int = 0) -> Tensor:
    """int64 from `low` up to and without `high`."""
    return torch.randint(
        low, high, shape, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def marks(*shape: int, seed: int = 0) -> Tensor:
    """True and False, half and half."""
    return uniform(*shape, seed=seed) > 0.5
