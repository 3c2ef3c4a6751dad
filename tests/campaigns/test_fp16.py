"""docs/results/fp16.md is what the campaign found, and loud pipelines are exported in fp16."""

from pathlib import Path

import pytest
from fp16.page import PAGE, STORE, render
from fp16.pipelines import NAMES, examine_pipeline


def test_the_page_is_what_the_results_render_to() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(STORE.read()), "run `make fp16`"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_loud_pipeline_is_finite_where_a_plain_conversion_is_not(
    name: str, tmp_path: Path
) -> None:
    row = examine_pipeline(name, tmp_path)
    assert row.plain == (None, None)
    assert row.outcome == "verified-by-emulation", row.reason
    assert {*row.parts.values()} == {"verified-by-emulation"}, row.parts
    latents, pictures = row.found
    assert latents is not None
    assert pictures is not None
    assert max(latents, pictures) < 2e-2
