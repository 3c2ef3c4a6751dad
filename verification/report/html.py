"""Build HTML and SVG from Python: text is escaped, elements are values."""

from collections.abc import Iterable
from html import escape

VOID = frozenset({"br", "meta", "col"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Html | None


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element.

    Args:
        children: text, which is escaped, and elements; None is left out.
        attributes: `class_` is class, and `data_value` is data-value.  True: the name alone; None
            and False: left out.
    """
    given = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Elements and text after one another."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(child, quote=False)
            for child in children
            if child is not None
        )
    )


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _text(value: str | float) -> str:
    """Numbers of drawings, without digits that no screen has."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
