"""Compare text with tests/golden/<name>; GOLDEN=accept in the environment rewrites the file."""

from pathlib import Path

from enginecast.testing import check_golden

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, text: str) -> None:
    """Fail unless the text is the golden one, up to line numbers in `# file.py:12` comments."""
    check_golden(FOLDER / name, text)
