"""The page of a report in a real browser: quiet, narrow, without network, and bounded."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from browser import PROGRAM, Browser, browser
from exports import Exports
from reports import full, report, slow_at

from enginecast.compiler.publication.report_details import origin_of, reported_plan
from enginecast.doctor.checks import examine
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.verification.report.comparison import Side, compare
from enginecast.verification.report.page import comparison_page_of, page_of
from enginecast.verification.report.speed import Speed

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


@needs_browser
def test_the_browser_sees_what_is_wrong_with_a_page(chrome: Browser, tmp_path: Path) -> None:
    """What shows that the test above can fail."""
    page = tmp_path / "wrong.html"
    wide = "<div style='width:900px'>x</div><script>console.error('no'); nothing()</script>"
    page.write_text(page_of(report()).replace("</body>", f"{wide}</body>"), encoding="utf-8")
    chrome.open(page, 390)
    assert chrome.evaluate(OVERFLOW) > 0
    assert len(chrome.complaints()) == 2
    page.write_text(page_of(report()).replace("</body>", "<img src='https://example.com/a.png'>"))
    chrome.open(page, 390)
    assert "Content Security Policy" in " ".join(chrome.complaints())


@needs_browser
def test_a_click_sorts_a_table_by_number(chrome: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_of(full()), encoding="utf-8")
    chrome.open(page, 1300)
    column = """(() => {
      const head = [...document.querySelectorAll("#quantization ~ .scroll table th")]
        .find((each) => each.textContent === "error");
      head.querySelector("button").click();
      const rows = [...head.closest("table").tBodies[0].rows];
      const texts = rows.map((row) => row.cells[head.cellIndex].textContent);
      return [head.getAttribute("aria-sort"), texts];
    })()"""
    up, texts = chrome.evaluate(column)
    down, reverse = chrome.evaluate(column)
    numbers = [float(text) for text in texts if text != "-"]
    assert (up, down) == ("ascending", "descending")
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 7
    assert texts[0] == "-"  # kept layers have no error
    assert [float(text) for text in reverse if text != "-"] == numbers[::-1]


@needs_browser
def test_it_reads_without_scripts_and_links_open_what_is_folded(
    chrome: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_of(full()), encoding="utf-8")
    chrome.open(page, 800, scripts=False)
    shown = "document.querySelector('{}').getBoundingClientRect().height"
    assert chrome.evaluate(shown.format(".strip svg")) > 50
    assert chrome.evaluate(shown.format("svg.graph")) > 50
    assert chrome.evaluate("document.querySelectorAll('th button').length") == 0
    chrome.open(page, 800)
    fold = "document.getElementById('pass-2').open"
    assert chrome.evaluate(fold) is False
    chrome.evaluate("document.querySelector(\"a[href='#pass-2']\").click()")
    chrome.evaluate("unfold()")
    assert chrome.evaluate(fold) is True


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


def test_the_page_says_what_the_engine_is_and_where_it_is_slow() -> None:
    page = " ".join(re.sub(r"<[^>]*>", " ", page_of(full()).partition("</style>")[2]).split())
    for text in (
        "bf16 engine for onnxruntime, of a T5EncoderModel with random (seed 3) weights",
        "! verified, but slower than fp32 on the machine of the export (0.53x the fp32 engine at"
        " 1x10): 1.1x the error of eager bf16",
        "use --precision fp32 on this machine",
        "0.53x ▼ slower the fp32 engine at 1x10",
        "2 threads of a CPU with AVX2, with random (seed 3) weights.",
        "two &lt;cats&gt; &amp; a dog not finite - last_hidden_state",
        "rain 6.00e-03 (worst) 0.980000",
        "input_ids input int64 [batch 1..64, 77] 0..255",
        "last_hidden_state output float16 [batch 1..64, 77, 64] -",
        "Weights take 72.0 KiB in fp32 (75%), 24.0 KiB in int8 (25%).",
        "encoder.block.0 16.0 KiB: fp32, int8",
        "The whole graph (70 nodes) is in engine.onnx ,",
        "✗ rejected: nothing was published",
    ):
        assert text in page, text


@pytest.mark.parametrize(
    ("gain", "quartiles", "said", "slower"),
    [
        (0.5, (0.4, 0.6), "; 0.50x the fp32 engine at 1x10", True),
        (0.9, (0.3, 1.05), "; 0.90x the fp32 engine at 1x10", False),  # by chance
        (4.0, (3.0, 5.0), "; 4.0x the fp32 engine at 1x10", False),
        (None, None, "; not timed beside the fp32 engine: too large", False),
    ],
)
def test_an_engine_that_is_slower_than_in_fp32_says_so(
    gain: float | None, quartiles: tuple[float, float] | None, said: str, slower: bool
) -> None:
    found = Speed((slow_at(gain, quartiles),), "int8", 1, without_fp32="too large")
    expected = f"13.0x eager at 1x10{said} (int8 against eager fp32, on 1 thread of this CPU)"
    assert str(found) == expected
    assert bool(found.slower) == bool(found.to_json()["slower_than_fp32"]) == slower
    both = Speed((*found.cases, slow_at(0.7)), "int8", 1)
    assert both.slower_than_fp32("it").startswith("slower" if slower else "partly slower")


def test_no_sign_warns_of_what_is_right() -> None:
    page = page_of(replace(report(), timed=None))
    assert '<div class="verdict "><b><span aria-hidden="true">✓ </span>verified: 1.1x' in page
    assert 'class="warn"' not in page


def test_a_layer_that_is_slower_than_what_it_replaces_is_marked() -> None:
    whole = full()
    assert whole.plan is not None
    layers = [replace(layer, gain=0.58) for layer in whole.plan.layers[1:2]]
    page = page_of(replace(whole, plan=replace(whole.plan, layers=tuple(layers))))
    assert 'class="slower">▼ 0.58x' in page
    assert re.search(r'<td class="bad" data-value="0.58">0.58x model, slower</td>', page)


def test_a_strip_of_equal_values_has_no_bar() -> None:
    page = page_of(report())
    [strip] = re.findall(r'<figure class="strip">.*?</figure>', page, re.DOTALL)
    assert "<b>fuse-rms-norm</b> worst 2.5e-07 at encoder.block.1" in strip
    heights = [
        float(h)
        for h in re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="0.88" height="([\d.]+)"', strip)
    ]
    assert len(heights) == 2
    assert heights[0] < heights[1]
    assert "canonicalize" not in strip


def test_a_large_model_makes_no_large_page() -> None:
    page = page_of(full(blocks=400, passes=30))
    assert len(page) < LARGE
    assert "more rows are in report.json" in page
    assert max(map(len, re.findall(r'<svg viewBox="0 0 (\d+) 100"', page))) <= 3
    assert " to encoder.block." in page  # neighbors share a bar


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


@pytest.mark.slow
def test_a_real_plan_is_shown_layer_by_layer(exports: Exports) -> None:
    made = exports("t5", "int8").report
    assert made.plan is not None
    quantized = [layer for layer in made.plan.layers if layer.choice != "keep"]
    assert quantized
    assert all(layer.bytes < layer.bytes_before for layer in quantized)
    assert 'id="quantization"' in page_of(made)


def test_the_date_is_that_of_the_source_where_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = examine()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = origin_of(machine, "enginecast export m -o d", {"weights": "ab"})
    assert made.date == "2023-11-14T22:13:20+00:00"
    assert made.packages["numpy"]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    assert origin_of(machine, "", {}).date > made.date


def test_a_plan_has_the_bytes_of_weights_and_scales() -> None:
    layer = LayerPlan(
        module="wi",
        source="m.py:1",
        kind="linear",
        weight="wi.weight",
        shape=(64, 256),
        choice="storage",
        bits=4,
        weights="block",
        block=32,
        error=0.01,
    )
    kept = msgspec.structs.replace(layer, module="wo", choice="keep")
    plan = QuantizationPlan(format="int8", arch="cpu", max_error=0.1, layers=(layer, kept))
    stored, whole = reported_plan(plan, "fp32").layers
    assert (stored.bytes_before, stored.bytes) == (64 * 256 * 4, 64 * 256 // 2 + 64 * 8 * 4)
    assert (whole.bytes, whole.scaling) == (64 * 256 * 4, "")
    assert reported_plan(plan, "fp16").layers[1].bytes == 64 * 256 * 2
