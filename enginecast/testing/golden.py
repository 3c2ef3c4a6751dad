"""Text that a test expects, in a file that is reviewed with the code."""

import os
import re
from pathlib import Path

# Line numbers of the source move with every edit above them and say nothing about a rewrite.
_LINE = re.compile(r"(?<=  # )([\w.-]+\.py):\d+$", re.MULTILINE)


def check_golden(path: Path, text: str) -> None:
    """Fail unless a file holds this text, up to line numbers in `# file.py:12` comments.

    GOLDEN=accept in the environment writes the file instead: read its diff before you commit it.

    Args:
        path: of the file.
        text: what it should hold, such as `Outcome.diff`.

    Raises:
        AssertionError: the text differs.
    """
    text = _LINE.sub(r"\1", text)
    if os.environ.get("GOLDEN") == "accept":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == expected, (
        f"{path} differs; run the tests with GOLDEN=accept in the environment and read its diff."
        f"  Expected:\n{expected}\ngot:\n{text}"
    )
