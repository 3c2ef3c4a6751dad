"""Pages, messages and help are written in plain American English."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEVER = (
    r"\bis told\b|\bcannot be had\b|\bno plain \w+|\bpassed over\b|\bheld against\b|\bis no model\b"
)
BRITISH = (
    r"(behavi|col|fav|hon|lab|neighb)our(s|ed|ing|ite)?|cent(re|red|res)|analys(e|ed|ing)|(organis|recognis|optimis|"
    r"initialis|normalis|quantis|serialis|summaris|minimis|maximis|canonicalis|legalis|specialis)"
    r"(e|ed|es|ing|ation)|catalogue|licence|grey|travell(ed|ing)|modell(ed|ing)|labell(ed|ing)|"
    r"cancelling|artefact(s)?|whilst"
)
WORDS = re.compile(rf"{NEVER}|\b(?:{BRITISH})\b", re.IGNORECASE)
ALLOWED = {"specialise", "specialised"}
"""A rung of the ladder, and so a value of `--fallback`."""
FOLDERS = (
    "enginecast",
    "capture",
    "passes",
    "exporters",
    "verification",
    "runtime",
    "cache",
    "docs",
)
FILES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *(
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".md", ".py") and path.name not in ("zoo.md", "operators.md")
    ),
]


def faults(text: str) -> list[str]:
    """Lines with words that a reader stumbles over."""
    return [
        f"{number}: {found[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for found in WORDS.finditer(line)
        if found[0].lower() not in ALLOWED
    ]


def test_every_page_and_source_is_plain() -> None:
    assert len(FILES) > 400
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in FILES
        if (wrong := faults(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize("text", ["One that is passed over.", "the colour", "Quantised layers"])
def test_it_finds_them(text: str) -> None:
    assert faults(text)
