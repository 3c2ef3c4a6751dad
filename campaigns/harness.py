"""What the campaigns share: a command line, a child process for each item, a row for each child.

One process imports the libraries once and forks a child for each item, so that neither a crash nor
a long run of one is a loss to the others.
"""

import argparse
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
from rows import Store, put_between

Item = TypeVar("Item")
Row = TypeVar("Row")
"""A dataclass: what became of an item."""

CAMPAIGNS = (
    *("zoo", "vision", "fp16", "diffusion", "operators", "flow", "adversary", "faults"),
    *("trt_gate", "trt_models"),
)
ROOT = Path(__file__).parents[1]

PATIENCE = 3600
"""Seconds on the clock after which a child that waits for something is ended."""
TICK = 0.05
"""Seconds between two looks at the children."""


@dataclass(frozen=True)
class Ended(Generic[Item]):
    """A child that has ended: its folder holds `log.txt` and whatever the work wrote there."""

    item: Item
    folder: Path
    status: int
    """What `os.wait4` gave: zero where the work was done."""
    seconds: float
    """Seconds of processor time."""
    limit: int
    """Seconds of processor time that it could take."""

    @property
    def late(self) -> bool:
        """Whether it was ended because it took too long."""
        signals = (signal.SIGXCPU, signal.SIGKILL)
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) in signals

    @property
    def timed_out(self) -> bool:
        """Whether it was late and used the processor all along.  A child that was killed earlier
        ran out of memory, say."""
        # The limit counts whole seconds, and what the child has of its own is a little less.
        return self.late and self.seconds >= 0.9 * self.limit

    @property
    def outcome(self) -> Literal["timed out", "crashed"]:
        """What became of its item, where the work was not done."""
        return "timed out" if self.timed_out else "crashed"

    @property
    def reason(self) -> str:
        """Why the work was not done."""
        return f"more than {self.limit} s" if self.timed_out else self.death

    @property
    def death(self) -> str:
        """How it ended, in words, with the last line of its log where it ended by itself."""
        if os.WIFSIGNALED(self.status):
            return f"killed by {signal.Signals(os.WTERMSIG(self.status)).name}"
        log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        last = "".join(log.strip().splitlines()[-1:])[:200]
        return f"exit code {os.waitstatus_to_exitcode(self.status)}: {last}"


def each(
    items: Sequence[Item],
    work: Callable[[Item, Path], object],
    place: Path,
    *,
    seconds: int,
    jobs: int = 1,
    memory: int | None = None,
    keep: Callable[[Item], str] | None = None,
) -> Iterator[Ended[Item]]:
    """Do `work(item, folder)` in a child for each item, `jobs` at once; give them as they end.

    A folder is below `place`.  It is removed when the next child is asked for, unless `keep` says
    its name.
    """
    waiting = list(reversed(items))
    children: dict[int, tuple[Item, Path, float]] = {}
    while waiting or children:
        while waiting and len(children) < jobs:
            item = waiting.pop()
            folder = _folder(place, keep(item) if keep else None)
            pid = _fork(work, item, folder, seconds, memory)
            children[pid] = item, folder, time.monotonic()
        time.sleep(TICK)
        for pid, (item, folder, started) in list(children.items()):
            late = time.monotonic() - started > PATIENCE
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status, usage = os.wait4(pid, 0 if late else os.WNOHANG)
            if ended:
                del children[pid]
                yield Ended(item, folder, status, usage.ru_utime + usage.ru_stime, seconds)
                if not keep:
                    shutil.rmtree(folder, ignore_errors=True)


def _folder(place: Path, name: str | None) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    if name is None:
        return Path(tempfile.mkdtemp(dir=place))
    folder = place / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _fork(
    work: Callable[[Item, Path], object],
    item: Item,
    folder: Path,
    seconds: int,
    memory: int | None,
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # What ran this process may have put files of its own in their places, as pytest does.
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        work(item, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Campaign(ABC, Generic[Item, Row]):
    """What there is to examine, and what becomes of the rows."""

    row: type[Row]
    store: Store
    page: Path | None = None
    markers: tuple[str, str] | None = None
    """What the written part of the page stands between; None: all of it is written."""
    seconds: int
    """Seconds of processor time that a child may take."""
    memory: int | None = None
    """Bytes of address space that a child may take."""
    jobs = 2
    """Children at once."""

    @abstractmethod
    def items(self) -> Sequence[Item]:
        """All that there is, in the order in which it is examined."""

    def labels(self, item: Item) -> tuple[str, ...]:
        """What `--only` may call an item: groups, and its name at last."""
        return (str(item),)

    def lacks(self, item: Item) -> str:
        """Why an item cannot be examined here; empty where it can."""
        return ""

    def prepare(self, folder: Path) -> None:
        """Load what every child needs; the folder is for what an export on the way makes."""

    @abstractmethod
    def examine(self, item: Item, folder: Path) -> Row:
        """What becomes of an item; in a child.  It may keep what it knows early by `keep_rows`."""

    def blank(self, item: Item) -> Row:
        """The row of a child that kept none."""
        return self.row(*self.labels(item))

    def ended(self, row: Any, child: Ended[Any]) -> None:
        """Put into a row how its child ended: after so much time, or before the work was done."""
        if child.status:
            row.outcome, row.reason = child.outcome, child.reason

    @abstractmethod
    def said(self, row: Row) -> str:
        """A row, for the terminal."""

    def render(self, found: Mapping[str, Any]) -> str:
        """What is written into the page, of the results."""
        return ""

    def finish(self, rows: Sequence[Row]) -> int:
        """Write the page; `rows` are the new ones.  The exit code."""
        if self.page:
            text = self.render(self.store.read())
            if self.markers:
                put_between(self.page, *self.markers, text)
            else:
                self.page.write_text(text, encoding="utf-8")
        return 0

    def run(
        self, items: Sequence[Item], place: Path, *, jobs: int = 0, keep: bool = False
    ) -> Iterator[Row]:
        """Examine each in a child of its own; give the rows as they come.

        Args:
            items: of `items()`.
            place: for the folders of the children.
            jobs: children at once; 0: as many as the campaign says.
            keep: leave the folders, each with the name of its item.
        """
        with tempfile.TemporaryDirectory() as warm:
            self.prepare(Path(warm))
        # Not gc.freeze: an export finds the functions of a model by gc.get_referrers.
        yield from self.rows(items, place, jobs or self.jobs, keep)

    def rows(self, items: Sequence[Item], place: Path, jobs: int, keep: bool) -> Iterator[Row]:
        """`run`, in a process that is prepared."""

        def work(item: Item, folder: Path) -> None:
            keep_rows([self.examine(item, folder)], folder)

        def name(item: Item) -> str:
            return "-".join(self.labels(item)).replace("/", "-")

        limits: dict[str, Any] = {"seconds": self.seconds, "memory": self.memory, "jobs": jobs}
        for child in each(items, work, place, **limits, keep=name if keep else None):
            blank = self.blank(child.item)
            row = (kept_rows(child.folder, type(blank)) or [blank])[0]
            self.ended(row, child)
            yield row


def keep_rows(rows: Sequence[Any], folder: Path) -> None:
    """Keep rows in the folder of a child: one that dies leaves what it knew."""
    kept = json.dumps([asdict(row) for row in rows])
    (folder / "rows.json").write_text(kept, encoding="utf-8")


def kept_rows(folder: Path, kind: type[Row]) -> list[Row]:
    """The rows that a child kept; none, if it died before."""
    try:
        kept = msgspec.json.decode((folder / "rows.json").read_bytes())
    except FileNotFoundError:
        return []
    return [msgspec.convert(row, kind) for row in kept]


def choose(campaign: Campaign[Item, Any], only: str = "", match: str = "") -> list[Item]:
    """The items that are called so.

    Args:
        campaign: whose.
        only: groups and names, comma-separated, or how these begin; empty: all.
        match: a regular expression that is found in the name.
    """
    parts = {part for part in only.split(",") if part}
    every = [(item, campaign.labels(item)) for item in campaign.items()]
    whole = parts & {label for _, labels in every for label in labels}
    begun = tuple(parts - whole)
    return [
        item
        for item, labels in every
        if not parts or whole & set(labels) or any(label.startswith(begun) for label in labels)
        if re.search(match, labels[-1])
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="campaigns/run.py")
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--only", default="", help="groups and names, comma-separated")
    parser.add_argument("--match", default="", help="a regular expression in names")
    parser.add_argument("--jobs", type=int, default=0, help="children at once")
    parser.add_argument("--keep", type=Path, help="folder for models, bundles and logs")
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    options = parser.parse_args()
    campaign: Campaign[Any, Any] = importlib.import_module(f"{options.campaign}.run").CAMPAIGN
    chosen = choose(campaign, options.only, options.match)
    if not chosen:
        parser.error(f"{options.campaign} has nothing that is called so")
    if options.missing:
        chosen = [item for item in chosen if not campaign.store.has(campaign.labels(item))]
    lacking = [campaign.lacks(item) for item in chosen]
    for reason, count in Counter(filter(None, lacking)).items():
        print(f"{reason}: {count} left out", flush=True)
    chosen = [item for item, reason in zip(chosen, lacking, strict=True) if not reason]
    rows = []
    with tempfile.TemporaryDirectory(prefix=f"{options.campaign}-") as temporary:
        place, keep = options.keep or Path(temporary), options.keep is not None
        for row in campaign.run(chosen, place, jobs=options.jobs, keep=keep):
            print(campaign.said(row), flush=True)
            campaign.store.merge([row])
            rows.append(row)
    return campaign.finish(rows)


def one_line(text: str, most: int) -> str:
    """A message on a line, without the folders of this machine, cut to so many characters."""
    return " ".join(without_folders(text).split())[:most]


def without_folders(text: str) -> str:
    """A message with the names of files alone: their folders are this machine's."""
    return re.sub(r"(/[\w.+-]+)+/", "", text)


def commit(*sources: str) -> str:
    """The last commit, or the last one that changed these files."""
    command = ["git", "log", "-1", "--format=%h", "--", *sources]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
