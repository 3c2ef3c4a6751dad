"""Every code block of the README and the site runs, or says why it does not."""

from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from docs_blocks import ROOT, Block, PageError, blocks, check, pages, run_page

BLOCKS = [block for page in pages() for block in blocks(page)]
QUICK = ROOT / "docs" / "extend" / "write-a-pass.md"
README = ROOT / "README.md"  # test_wheel.py runs it where the wheel is installed
RUNNABLE = sorted(
    {
        block.page
        for block in BLOCKS
        if not block.reason and block.language in ("sh", "console", "python")
    }
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_says_what_it_is(block: Block) -> None:
    check(block)


def test_the_quick_page_runs(tmp_path: Path) -> None:
    assert run_page(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [p for p in RUNNABLE if p not in (QUICK, README)], ids=lambda page: page.stem
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path)


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```sh\nfalse\ntrue\n```", "exit code 1"),
        ("```console\n$ false\n```", "exit code 1 of false"),
        ("```console\n$ echo one; echo two\none\nthree\n```", "expected\none\nthree"),
        ("```console\n$ printf 'a\\nb\\n'\nb\n```", "expected\nb"),
        ("```python\nassert False\n```", "AssertionError"),
    ],
)
def test_what_does_not_run_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"page\.md:\d+: ") as caught:
        run_page(page_of(tmp_path, text), tmp_path)
    assert message in str(caught.value)


def test_no_example_has_the_name_of_a_library() -> None:
    """Python puts the folder of a script first: `examples/triton` was taken for triton by torch."""
    libraries = {*packages_distributions(), "triton", "tensorrt"}
    assert not libraries & {path.stem for path in (ROOT / "examples").iterdir()}
