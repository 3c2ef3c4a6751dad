"""What mkdocs asks while it builds the site: its name, pages made from the code, and links out of docs/."""

import re
from html import escape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from commands import command_page
from error_page import error_page
from mkdocs.structure.files import File, Files
from pass_page import pass_page
from schema_page import schema_page

from enginecast.version import __version__

ROOT = Path(__file__).parents[2]
MADE = {
    "reference/cli.md": command_page,
    "reference/exit-codes.md": error_page,
    "reference/passes.md": pass_page,
    "reference/schemas.md": schema_page,
}
OUTSIDE = {name: f"project/{name.lower()}" for name in ("CHANGELOG.md", "CONTRIBUTING.md")} | {
    "SECURITY.md": "project/security.md"
}
"""Pages of the repository's root that are pages of the site, too."""

CODE_IN_TABLE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code with an escaped bar, which GitHub shows as a bar and Python's Markdown as it stands."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:]+)\)")


def on_config(config: Any) -> None:
    """Show the version in the header and in the titles."""
    config.site_name = f"{config.site_name} {__version__}"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that no file in docs/ holds."""
    for place, make in MADE.items():
        files.append(File.generated(config, place, content=make()))
    for name, place in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links that leave docs/ to pages of the site, or name the file of the repository."""
    here = page.file.src_uri
    at_root = {place: name for name, place in OUTSIDE.items()}.get(here)

    def led(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path:
            return found[0]
        folder = "" if at_root else str(PurePosixPath("docs", here).parent)
        whole = normpath(f"{folder}/{path}" if folder else path)
        if whole.startswith("docs/"):
            place = whole.removeprefix("docs/")
        elif whole in OUTSIDE:
            place = OUTSIDE[whole]
        else:
            return f"{text} (`{whole}`)" if whole not in text else text
        link = relpath(place, str(PurePosixPath(here).parent))
        return f"[{text}]({link}{'#' if anchor else ''}{anchor})"

    return CODE_IN_TABLE.sub(barred, LINK.sub(led, markdown))


def barred(found: re.Match[str]) -> str:
    """Code whose bars do not end a cell."""
    return "<code>" + escape(found[1]).replace("\\|", "&#124;") + "</code>"
