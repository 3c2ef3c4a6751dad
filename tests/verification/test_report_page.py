"""The page of a report in a real browser: quiet, narrow, without network, and bounded."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from browser import PROGRAM, Browser, browser
from exports import Exports
from reports import full, report

from enginecast.verification.report.comparison import Side, compare
from enginecast.verification.report.page import comparison_page_of, page_of

WIDTHS = (390, 800, 1300)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LARGE = 5_000_000
"""Bytes that no page may reach."""

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no chromium or chrome on PATH")


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def both() -> str:
    one, other = full(), replace(full(), precision="fp16", floor_dtype="fp16", passes=())
    return comparison_page_of(compare(Side("fp32.bundle", one), Side("fp16.bundle", other)))


PAGES = {"whole": lambda: page_of(full()), "small": lambda: page_of(report()), "two": both}


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_quiet_and_fits(name: str, width: int, chrome: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(PAGES[name](), encoding="utf-8")
    chrome.open(page, width)
    for _ in range(2):  # as it opens, and with all that folds open
        assert chrome.evaluate(OVERFLOW) == 0
        chrome.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert chrome.complaints() == []
    assert chrome.requests() == [page.as_uri()]


def test_the_strip_comes_first_and_shows_what_is_lost_in_a_color_of_its_own() -> None:
    page = page_of(full())
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
    assert headings[:6] == [
        *("Error by module", "Outputs", "Prompts", "Speed", "Inputs and outputs"),
        "Quantization",
    ]
    strip = page[page.index('<figure class="strip">') :]
    strip = strip[: strip.index("</figure>")]
    assert strip.count('class="lost"') == 24 - 10
    assert "<title>encoder.block.2.o: infinite or NaN</title>" in strip
    assert [label for label in re.findall(r'class="label">(.*?)<', strip)] == [
        "block 0",
        *"12345",
    ]
    assert re.findall(r'<span style="bottom:\d+%">(1e-?\d+)</span>', strip)
    assert "infinite or NaN</span>" in page[: page.index('<figure class="strip">')]
    whole = page_of(report())
    assert "infinite or NaN" not in whole
    assert "1e+30" not in page


def test_prompts_of_which_none_is_finite_have_no_bars() -> None:
    made = full()
    lost = tuple(
        msgspec.structs.replace(one, prompt_errors=(None,) * 3, prompt_cosines=(None,) * 3)
        for one in made.verdict.outputs
    )
    page = page_of(replace(made, verdict=msgspec.structs.replace(made.verdict, outputs=lost)))
    assert page.count('<td class="bad">not finite</td>') >= 3


def test_a_real_export_says_where_it_comes_from_and_what_its_passes_did(exports: Exports) -> None:
    made = exports("t5", "bf16").report
    assert made.origin is not None
    assert set(made.origin.fingerprint) >= {"weights", "config"}
    assert (made.size > 0, made.nodes > 0) == (True, True)
    for check in made.passes:
        assert check.details is not None
        sites = sum(group.count for group in check.details.sites) + check.details.sites_left_out
        assert sites == check.rewritten + check.left_alone
    fused = next(check.details for check in made.passes if check.name == "fuse-rms-norm")
    assert fused is not None
    drawing = fused.drawings[0]
    assert drawing.module.endswith("layer_norm")
    assert [n.op for n in drawing.after if n.state == "new"] == ["rms_norm"]
    assert {n.op for n in drawing.before if n.state == "gone"} >= {"pow", "rsqrt", "mean"}
    assert "+%" in fused.diff
    assert len(page_of(made)) < LARGE
