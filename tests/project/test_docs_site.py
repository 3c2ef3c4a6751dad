"""The site builds without a warning, works without a network, and no link of a page is broken."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from enginecast.cli.terminal.help import EXAMPLES
from enginecast.passes.registry import known_passes

ROOT = Path(__file__).parents[2]
AT_ROOT = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
MADE = {"cli.md", "exit-codes.md", "passes.md", "schemas.md"}
"""Pages of docs/reference that `make docs` makes from the code."""


class Page(HTMLParser):
    """Names to jump to, links, and what a browser would load."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.names |= {found.get("id", ""), found.get("name", "")}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("script", "img") and "src" in found:
            self.loaded.append(found["src"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.loaded.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.slow
def test_links_lead_somewhere(site: Path) -> None:
    found = {page: Page(page) for page in site.rglob("*.html")}
    broken = []
    for page, read in found.items():
        for link in read.links:
            if re.match(r"[a-z]+:", link) or page.name == "404.html":
                continue
            path, anchor = urldefrag(unquote(link))
            target = (page.parent / path).resolve() if path else page
            if target.is_dir():
                target /= "index.html"
            if not target.is_file() or (anchor and anchor not in found[target].names):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert len(found) > 40
    assert not broken


@pytest.mark.slow
def test_nothing_comes_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert [name for name in Page(page).loaded if re.match(r"(https?:)?//", name)] == []


@pytest.mark.slow
def test_reference_is_that_of_the_code(site: Path) -> None:
    commands = Page(site / "reference" / "cli.html").names
    assert {name.replace(" ", "-") for name in EXAMPLES} <= commands
    assert set(known_passes()) <= Page(site / "reference" / "passes.html").names
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("run_async", "CachedEncoder", "VerificationError", "put_back", "hidden_states"):
        assert name in python


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Files and anchors that a page of Markdown links to."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, anchor = urldefrag(target)
        if "://" not in path:
            yield (page.parent / path).resolve() if path else page, anchor


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*AT_ROOT, *sorted((ROOT / "docs").rglob("*.md"))], ids=str)
def test_links_work_in_the_repository_too(page: Path) -> None:
    for target, anchor in links(page):
        if target.parent.name == "reference" and target.name in MADE:
            continue
        assert target.exists(), target
        assert not anchor or anchor in headings(target), f"{target}#{anchor}"
