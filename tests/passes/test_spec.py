"""The grammar of a pipeline: round trips, and errors that point."""

import random

import pytest

from enginecast.errors import SpecError
from enginecast.passes.ir.spec import PassSpec, Value, parse, render

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


def test_random_specs_round_trip_in_both_directions() -> None:
    alphabet = 'aZ_9.-+ "\\\n\t\r,{}=eE\u00e9\u2028\x00'

    def value() -> Value:
        kinds: list[Value] = [
            "".join(random.choices(alphabet, k=random.randrange(6))),
            random.choice(["true", "1", "-0", "1e5", "inf", "."]),
            random.choice([True, False]),
            random.randrange(-(10**12), 10**12),
            random.choice([1, -1]) * random.random() * 10.0 ** random.randrange(-300, 300),
        ]
        return random.choice(kinds)

    for _ in range(2000):
        spec = PassSpec(
            random.choice(["a", "fuse-x", "Z_.9"]),
            tuple(
                (key, tuple(value() for _ in range(random.randrange(1, 4))))
                for key in random.sample(["k", "to", "skip_modules_pattern"], random.randrange(4))
            ),
        )
        text = render([spec, spec])
        again = parse(text)
        assert again == (spec, spec)
        assert [list(map(type, values)) for _, values in again[0].options] == [
            list(map(type, values)) for _, values in spec.options
        ]
        assert render(again) == text


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
