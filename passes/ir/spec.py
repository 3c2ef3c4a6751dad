r"""The text of a pipeline: parse it, print it, point at a place in it.  Needs no torch.

    pipeline ::= (part ("," part)*)?
    part     ::= pass | "@" NAME                     the passes of the preset of this name
    pass     ::= NAME ("{" option (" " option)* "}")?
    option   ::= NAME "=" value ("," value)*
    value    ::= true | false | NUMBER | NAME | "quoted text"

    unify-dtype{to=bf16 keep=lm_head,".*wo$"},fuse-rms-norm

Blanks and line breaks may stand between any two tokens; the canonical text has none but the blank
between options.  Inside quotes a backslash stands before `"`, `\\`, `n` (line break) and `t` (tab)
and before nothing else, so that a regular expression never changes its meaning by accident.  In a
shell, quote the whole text: bash expands braces.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple, NoReturn

from enginecast.errors import SpecError, UsageError

Value = bool | int | float | str
Presets = Callable[[str], str]
"""The text of a preset by its name; a UsageError where there is none."""

_BLANK = re.compile(r"\s*")
_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_INTEGER = re.compile(r"-?[0-9]{1,40}")
_FLOAT = re.compile(r"-?(?=\.?[0-9])[0-9]{0,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,5})?")
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}
_ESCAPED = {meaning: "\\" + letter for letter, meaning in _ESCAPES.items()}
_SPECIAL = re.compile(r'["\\\n\t]')
_CONSTANTS = {"true": True, "false": False}


class TextPosition(NamedTuple):
    """A position in the text of a pipeline, for errors that point."""

    text: str
    position: int

    def error(self, message: str, *, hint: str = "") -> SpecError:
        """A SpecError that shows the line of the text and a caret under the place."""
        start = self.text.rfind("\n", 0, self.position) + 1
        line = self.text[start:].split("\n", 1)[0]
        caret = " " * (self.position - start) + "^"
        return SpecError(f"{message}\n  {line}\n  {caret}", hint=hint)


@dataclass(frozen=True)
class PassSpec:
    """One pass of a pipeline, by name, with its options in the order they were written.

    Raises:
        SpecError: a name that cannot be spelled, an option without a value or given twice, or a
            number that has no text.
    """

    name: str
    options: tuple[tuple[str, tuple[Value, ...]], ...] = ()

    def __post_init__(self) -> None:
        keys = [key for key, _ in self.options]
        for name in (self.name, *keys):
            if not _NAME.fullmatch(name):
                raise SpecError(f"{name!r} cannot be a name in a pipeline spec")
        for key, values in self.options:
            if keys.count(key) > 1:
                raise SpecError(f"option '{key}' of pass '{self.name}' is given twice")
            if not values:
                raise SpecError(f"option '{key}' of pass '{self.name}' has no value")
            numbers = [value for value in values if not isinstance(value, str)]
            if not all(abs(n) < 10**40 if isinstance(n, int) else isfinite(n) for n in numbers):
                raise SpecError(f"option '{key}' of pass '{self.name}': number without a text form")

    def __str__(self) -> str:
        if not self.options:
            return self.name
        options = (f"{key}={','.join(map(_render_value, values))}" for key, values in self.options)
        return f"{self.name}{{{' '.join(options)}}}"


@dataclass(frozen=True)
class Located:
    """A PassSpec with the positions of its parts in the text it came from."""

    spec: PassSpec
    place: TextPosition
    """Start of the pass name."""
    keys: dict[str, TextPosition]
    """Start of each option name."""
    values: dict[str, tuple[TextPosition, ...]]
    """Start of each value of each option."""


def parse(text: str) -> tuple[PassSpec, ...]:
    """Read the text of a pipeline; blank text is the pipeline without passes.

    Raises:
        SpecError: the text is not in the grammar; shows it with a caret under the place.
    """
    return tuple(located.spec for located in parse_located(text))


def parse_located(text: str, presets: Presets | None = None) -> tuple[Located, ...]:
    """Like `parse`, but keeps all positions, so that later checks can point at them.

    Args:
        presets: what stands for `@NAME`, whose passes all have its position; None: no text has it.
    """
    return _Reader(text, presets).pipeline()


def spelled_out(text: str, presets: Presets) -> str:
    """The text with the passes of its presets; as it is, where it names none.

    Raises:
        SpecError: the text is not in the grammar, or names no preset; shows the place.
    """
    named: list[str] = []
    found = parse_located(text, lambda name: named.append(name) or presets(name))  # type: ignore[func-returns-value]
    return render([one.spec for one in found]) if named else text


def render(specs: tuple[PassSpec, ...] | list[PassSpec]) -> str:
    """The canonical text: `parse(render(specs)) == tuple(specs)`."""
    return ",".join(map(str, specs))


def _render_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    if _NAME.fullmatch(value) and value not in _CONSTANTS:
        return value
    return '"' + _SPECIAL.sub(lambda found: _ESCAPED[found[0]], value) + '"'


class _Reader:
    """Recursive-descent parser of one text; `position` is its only state."""

    def __init__(self, text: str, presets: Presets | None) -> None:
        self.text = text
        self.presets = presets
        self.position = 0

    def pipeline(self) -> tuple[Located, ...]:
        self.blank()
        if self.position == len(self.text):
            return ()
        elements = [*self.part()]
        while self.accept(","):
            elements += self.part()
        if self.position < len(self.text):
            self.fail("expected ',' or the end")
        return tuple(elements)

    def part(self) -> tuple[Located, ...]:
        place = self.here()
        if self.presets is None or not self.text.startswith("@", self.position):
            return (self.element(),)
        self.position += 1
        name = self.name("the name of a preset")
        try:
            found = parse_located(self.presets(name))
        except UsageError as error:
            raise place.error(f"@{name}: {error.message}", hint=error.hint) from error
        return tuple(
            Located(
                one.spec,
                place,
                dict.fromkeys(one.keys, place),
                {key: (place,) * len(values) for key, values in one.values.items()},
            )
            for one in found
        )

    def element(self) -> Located:
        place = self.here()
        name = self.name("the name of a pass")
        options: list[tuple[str, tuple[Value, ...]]] = []
        keys: dict[str, TextPosition] = {}
        values: dict[str, tuple[TextPosition, ...]] = {}
        if self.accept("{"):
            while not keys or not self.accept("}"):
                at = self.here()
                key = self.name("an option" if not keys else "an option or '}'")
                if key in keys:
                    raise at.error(f"option '{key}' is given twice")
                if not self.accept("="):
                    self.fail(f"expected '=' after option '{key}'")
                chosen = [(self.here(), self.value())]
                while self.accept(","):
                    chosen.append((self.here(), self.value()))
                keys[key] = at
                values[key] = tuple(where for where, _ in chosen)
                options.append((key, tuple(value for _, value in chosen)))
        return Located(PassSpec(name, tuple(options)), place, keys, values)

    def name(self, expected: str) -> str:
        word = _WORD.match(self.text, self.position)
        if word is None or not _NAME.fullmatch(word[0]):
            self.fail(f"expected {expected}")
        return self.take(word)

    def value(self) -> Value:
        if self.text.startswith('"', self.position):
            return self.quoted()
        word = _WORD.match(self.text, self.position)
        if word is None:
            self.fail("expected a value")
        number = _number(word[0])
        if number is None and not _NAME.fullmatch(word[0]):
            self.fail(
                "expected a value", hint=f'Text that is not a plain name is quoted: "{word[0]}".'
            )
        self.take(word)
        return _CONSTANTS.get(word[0], word[0]) if number is None else number

    def quoted(self) -> str:
        token = _QUOTED.match(self.text, self.position)
        if token is None:
            self.fail("expected the closing quote on this line")
        for escape in _ESCAPE.finditer(token[1]):
            if escape[1] not in _ESCAPES:
                self.position += 1 + escape.start()
                self.fail(f"unknown escape {escape[0]}", hint=r"Write \\ for a backslash.")
        self.take(token)
        return _ESCAPE.sub(lambda escape: _ESCAPES[escape[1]], token[1])

    def accept(self, character: str) -> bool:
        if not self.text.startswith(character, self.position):
            return False
        self.position += 1
        self.blank()
        return True

    def take(self, token: re.Match[str]) -> str:
        self.position = token.end()
        self.blank()
        return token[0]

    def blank(self) -> None:
        blank = _BLANK.match(self.text, self.position)
        self.position = blank.end() if blank else self.position

    def here(self) -> TextPosition:
        return TextPosition(self.text, self.position)

    def fail(self, message: str, *, hint: str = "") -> NoReturn:
        raise self.here().error(f"{message} in pipeline spec", hint=hint)


def _number(word: str) -> int | float | None:
    if _INTEGER.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word) and not word.lstrip("-").isdigit() and isfinite(float(word)):
        return float(word)
    return None
