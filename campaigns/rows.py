"""The rows of a campaign in its results.json, and what their pages are made of."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from enginecast.doctor.checks import cpu_class

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Store:
    """The rows of a campaign, by name, or by group and name."""

    file: Path
    under: str = ""
    """The key of the file below which the rows stand, beside `versions`; empty: it has no more."""
    keys: tuple[str, ...] = ("name",)
    """Fields of a row that say where it stands: groups, and the name at last."""
    libraries: tuple[str, ...] = ()
    """Their versions are kept, where they are installed."""
    order: Callable[[Mapping[str, Any]], Iterable[str]] = sorted
    """The names that rows may have, in their order."""

    def read(self, file: Path | None = None) -> dict[str, Any]:
        """The results there are."""
        file = file or self.file
        if not file.exists():
            return {"versions": {}, self.under: {}} if self.under else {}
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def has(self, labels: Sequence[str]) -> bool:
        """Whether there is a row of these groups and this name."""
        found = self.read()
        kept: Any = found[self.under] if self.under else found
        for label in labels:
            kept = kept.get(label)
            if kept is None:
                return False
        return True

    def merge(self, rows: Iterable[Any], file: Path | None = None) -> None:
        """Put rows into the results, in place of older ones of the same names."""
        found = self.read(file)
        for row in rows:
            reported = asdict(row)
            *groups, name = (reported.pop(key) for key in self.keys)
            kept = found[self.under] if self.under else found
            for group in groups:
                kept = kept.setdefault(group, {})
            kept[name] = reported
            ordered = {name: kept[name] for name in self.order(kept) if name in kept}
            kept.clear()
            kept |= ordered
        for library in self.libraries:
            try:
                found["versions"][library] = version(library)
            except PackageNotFoundError:
                continue
        if self.libraries:
            found["cpu"] = cpu_class()
        self.write(found, file or self.file)

    def write(self, found: Mapping[str, Any], file: Path) -> None:
        """Write results into a file."""
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def versions(found: Mapping[str, Any]) -> str:
    """The line of a page that names the libraries and the CPU."""
    libraries = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return f"{libraries}. CPU: {found.get('cpu') or 'class not recorded'}."


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def cell(text: str, most: int, *, escape: str = "|`<") -> str:
    """A text that fits in a cell, and is no Markdown.

    Args:
        text: of one line.
        most: characters.
        escape: what is replaced of "|", "`" and "<".
    """
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    for sign, said in {"|": "\\|", "`": "'", "<": "&lt;"}.items():
        cut = cut.replace(sign, said) if sign in escape else cut
    return cut


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Rewrite what stands between two markers of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")
