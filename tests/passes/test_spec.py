"""The grammar of a pipeline: round trips, and errors that point."""

import pytest

from enginecast.errors import SpecError
from enginecast.passes.ir.spec import PassSpec, Value, parse

FULL = 'unify-dtype{to=bf16 keep=lm_head,".*wo$"},fuse-rms-norm'


def test_parse_reads_names_options_and_lists() -> None:
    assert parse(FULL) == (
        PassSpec("unify-dtype", (("to", ("bf16",)), ("keep", ("lm_head", ".*wo$")))),
        PassSpec("fuse-rms-norm"),
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("12", 12),
        ("-3", -3),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("2.", 2.0),
        ("-1.5E+3", -1500.0),
        ("True", "True"),
        ("nan", "nan"),
        ("encoder.block.0", "encoder.block.0"),
        ('"true"', "true"),
        ('"12"', "12"),
        ('""', ""),
        (r'"a\"b\\c\nd\te"', 'a"b\\c\nd\te'),
        (r'"\\.wo$"', r"\.wo$"),
        ('"Größe, {x}=1"', "Größe, {x}=1"),
    ],
)
def test_values(text: str, value: Value) -> None:
    found = parse(f"p{{k={text}}}")[0].options[0][1][0]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("drop-noop-cast{x=}", "expected a value", 17),
        ("a,", "expected the name of a pass", 2),
        ("a b", "expected ',' or the end", 2),
        ("8a", "expected the name of a pass", 0),
        ("a{x", "expected '=' after option 'x'", 3),
        ("a{}", "expected an option", 2),
        ("a{x=1", "expected an option or '}'", 5),
        ("a{x=1 x=2}", "option 'x' is given twice", 6),
        ("a{x=1,}", "expected a value", 6),
        ("a{x=8bit}", "expected a value", 4),
        ("a{x=1e999}", "expected a value", 4),
        ('a{x="b}', "expected the closing quote", 4),
        (r'a{x=".*\.wo"}', r"unknown escape \.", 7),
        ("a}", "expected ',' or the end", 1),
    ],
)
def test_errors_point_at_the_place(text: str, message: str, position: int) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    first, shown, caret = caught.value.message.split("\n")
    assert message in first
    assert shown == f"  {text}"
    assert caret.index("^") == position + 2
