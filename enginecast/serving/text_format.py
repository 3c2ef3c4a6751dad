"""Protobuf's text format, in which Triton reads `config.pbtxt`; protobuf itself is not needed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Name(str):
    """A value of an enum: `KIND_CPU`, without quotes."""

    __slots__ = ()


Message = Mapping[str, Any]
"""Fields by name.  A value is a text, a `Name`, a number, a bool, a message, or several of them."""


def text_format(message: Message) -> str:
    """The text of a message; fields stay in their order."""
    return "\n".join(_lines(message, "")) + "\n"


def map_field(values: Mapping[str, Any]) -> list[Message]:
    """A map of protobuf's: a message with key and value for each entry."""
    return [{"key": key, "value": value} for key, value in values.items()]


def _lines(message: Message, indent: str) -> Iterator[str]:
    for name, value in message.items():
        if isinstance(value, Mapping):
            yield from _block(name, value, indent)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if value and isinstance(value[0], Mapping):
                for one in value:
                    yield from _block(name, one, indent)
            else:
                yield f"{indent}{name}: [{', '.join(map(_scalar, value))}]"
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _block(name: str, message: Message, indent: str) -> Iterator[str]:
    if not message:
        yield f"{indent}{name} {{}}"
        return
    yield f"{indent}{name} {{"
    yield from _lines(message, f"{indent}  ")
    yield f"{indent}}}"


def _scalar(value: Any) -> str:
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    return str(value)


def _escaped(character: str) -> str:
    if character in '\\"':
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode())
