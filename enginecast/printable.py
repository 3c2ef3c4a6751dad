"""Text of others on a terminal, which takes some characters for commands."""

_CODES = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def printable(text: str) -> str:
    r"""Text with its control characters written out: a name may hold "\x1b[2J"."""
    return text.translate(_CODES)
