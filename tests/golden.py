"""Compare text with tests/golden/<name>; GOLDEN=accept in the environment rewrites the file."""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
# Line numbers of the source move with every edit above them and say nothing about a rewrite.
_LINE = re.compile(r"(?<=  # )([\w.-]+\.py):\d+$", re.MULTILINE)


def check(name: str, text: str) -> None:
    """Fail unless the text is the golden one, up to line numbers in `# file.py:12` comments."""
    text = _LINE.sub(r"\1", text)
    path = FOLDER / name
    if os.environ.get("GOLDEN") == "accept":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == expected, f"{path} differs; run `make golden` and read `git diff tests/golden`"
