"""Reports: tables for people, JSON for programs, one page that loads nothing."""

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from exports import cast
from reports import report
from rich.console import Console

from enginecast.runtime.bundle.manifest import Outcome
from enginecast.verification.report.data import Report
from enginecast.verification.report.files import to_json, write_report
from enginecast.verification.report.speed import Speed, SpeedAt
from enginecast.verification.report.tables import print_report


def printed(shown: Report) -> str:
    stream = io.StringIO()
    print_report(shown, Console(file=stream, width=160, no_color=True))
    return stream.getvalue()


def test_the_terminal_shows_verdict_passes_and_fusions() -> None:
    text = printed(report())
    assert "verified: 1.1x the error of eager bf16" in text
    assert "cosine at least 0.999980 for every token of all 64 prompts" in text
    assert "error / eager bf16's" in text
    line = next(line for line in text.splitlines() if line.startswith("last_hidden_state"))
    assert line.split() == [
        "last_hidden_state",
        "1.1x",
        "3.0x",
        "5.50e-03",
        "0.9999800",
        "0.9999900",
        "45.2",
        "-",
    ]
    line = next(line for line in text.splitlines() if line.startswith("fuse-rms-norm"))
    assert "encoder.block.1 modeling_t5.py:66" in line
    assert "2.50e-07" in line
    line = next(line for line in text.splitlines() if line.startswith("canonicalize"))
    assert "equal" in line.split()
    assert "a cast between rsqrt and mul" in text


def test_json_holds_everything_and_is_the_same_every_time() -> None:
    content = json.loads(to_json(report()))
    assert content["verdict"]["outputs"][0]["ratio"] == 1.1
    assert content["passes"][0]["modules"]["encoder.block.1"] == 2.5e-7
    assert content["fusions"][0]["missing"] == ["encoder.block.0: a cast between rsqrt and mul"]
    assert to_json(report()) == to_json(report())


class Page(HTMLParser):
    """Collects what a page would load, and checks that its tags close."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        addresses = [str(value) for name, value in attrs if name in {"src", "href"}]
        self.loads += [address for address in addresses if not address.startswith("#")]
        self.loads += [tag] if tag in {"link", "iframe", "img", "object"} else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("outcome", ["verified", "rejected"])
def test_the_page_is_whole_and_loads_nothing(tmp_path: Path, outcome: Outcome) -> None:
    as_json, as_html = write_report(tmp_path, report(outcome, ("because <b>",)))
    assert (as_json.name, as_html.name) == ("report.json", "report.html")
    source = as_html.read_text(encoding="utf-8")
    page = Page()
    page.feed(source)
    assert page.open == []
    assert page.loads == []
    assert "url(" not in source
    text = " ".join(" ".join(page.text).split())
    assert "t5 <small> & [bold]" in text
    assert "because <b>" in text
    assert "1.1x" in text
    assert "a cast between rsqrt and mul" in text
    assert "other values now leave encoder.block.0.layer.0" in text
    assert ('class="verdict rejected"' in source) == (outcome == "rejected")


def test_inspect_shows_why_an_engine_was_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "t5.rejected"
    folder.mkdir()
    write_report(folder, report("rejected", ("last_hidden_state: 9x the error of eager",)))
    done = cast(capsys, "inspect", folder)
    assert (done.code, done.err) == (0, "")
    assert "t5 <small> & [bold] in bf16 for onnxruntime" in done.out
    assert "last_hidden_state: 9x the error of eager" in done.out
    assert f"nothing was published; {folder / 'report.html'} has all of it" in done.out
    assert cast(capsys, "inspect", folder, "--json").json["verdict"]["outcome"] == "rejected"
    (folder / "report.json").write_text('{"model": 3}')
    done = cast(capsys, "inspect", folder)
    assert (done.code, "report.json: not a report of this version" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((0.5, 0.6), "slower than fp32 on this machine (0.50x the fp32 engine at 1x10, 0.60x at"),
        ((0.5, 1.2), "partly slower than fp32 on this machine (0.50x the fp32 engine at 1x10, 1.2"),
        ((1.1, 1.2), ""),
    ],
)
def test_an_engine_that_is_slower_than_fp32_says_so(gains: tuple[float, float], said: str) -> None:
    cases = tuple(
        SpeedAt(2.0, (1.9, 2.1), 4, {"input_ids": (rows, 10)}, {}, gain, (gain, gain))
        for rows, gain in zip((1, 32), gains, strict=True)
    )
    found = Speed(cases, "fp8", 1).slower_than_fp32("this machine")
    assert found.startswith(said)
    assert bool(found) == bool(said)
