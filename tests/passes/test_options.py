"""Fields of a pass as options: conversion, refusal with a caret, and the way back."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from torch.export import ExportedProgram

from enginecast.errors import SpecError
from enginecast.passes.ir.base import Pass, PassContext, Site
from enginecast.passes.ir.options import pass_from_spec
from enginecast.passes.ir.spec import parse_located


class _Nothing(Pass):
    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        return []


@dataclass(frozen=True)
class Tune(_Nothing):
    """One option of every kind."""

    name: ClassVar[str] = "tune"
    to: Literal["fp16", "bf16"] = "bf16"
    on: bool = False
    size: int = 1
    ratio: float = 0.5
    label: str = "x"
    keep: tuple[str, ...] = ()
    widths: tuple[int, ...] = field(default_factory=lambda: (1, 2))
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size} is negative")


def make(cls: type[Pass], text: str) -> Pass:
    return pass_from_spec(cls, parse_located(text)[0])


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("tune", {}),
        ("tune{to=fp16}", {"to": "fp16"}),
        ("tune{on=true size=3}", {"on": True, "size": 3}),
        ("tune{ratio=2}", {"ratio": 2.0}),
        ("tune{keep=a}", {"keep": ("a",)}),
        ('tune{keep=lm_head,".*wo$" limit=4}', {"keep": ("lm_head", ".*wo$"), "limit": 4}),
        ("tune{widths=3}", {"widths": (3,)}),
    ],
)
def test_options_become_fields(text: str, options: dict[str, Any]) -> None:
    made = make(Tune, text)
    assert made == Tune(**options)
    assert {key: type(getattr(made, key)) for key in options} == {
        key: type(value) for key, value in options.items()
    }


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("tune{too=fp16}", "pass 'tune' has no option 'too'", 5),
        ("tune{name=x}", "pass 'tune' has no option 'name'", 5),
        ("tune{to=fp32}", "option 'to' expects fp16 or bf16, got fp32", 8),
        ("tune{on=1}", "option 'on' expects true or false, got 1", 8),
        ("tune{size=true}", "option 'size' expects a whole number, got true", 10),
        ("tune{size=1.0}", "option 'size' expects a whole number, got 1.0", 10),
        ("tune{ratio=true}", "option 'ratio' expects a number, got true", 11),
        ("tune{label=90}", "option 'label' expects text, got 90", 11),
        ("tune{size=1,2}", "option 'size' takes one value, got 2", 12),
        ("tune{keep=a,7}", "option 'keep' expects text, got 7", 12),
        ("tune{limit=x}", "option 'limit' expects a whole number, got x", 11),
        ("tune{size=-1}", "pass 'tune' refuses its options: size=-1 is negative", 0),
    ],
)
def test_what_does_not_fit_is_refused_at_its_place(text: str, message: str, position: int) -> None:
    with pytest.raises(SpecError) as caught:
        make(Tune, text)
    first, shown, caret = caught.value.message.split("\n")
    assert (first, shown, caret.index("^") - 2) == (message, f"  {text}", position)


def test_misspelled_option_names_the_close_one_and_all() -> None:
    with pytest.raises(SpecError) as caught:
        make(Tune, "tune{too=fp16}")
    assert "Did you mean 'to'" in caught.value.hint
    assert "widths" in caught.value.hint
