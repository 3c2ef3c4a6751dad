"""The table of pipelines in docs/results/diffusion.md is what the campaign found."""

from diffusion.page import BEGIN, END, PAGE, STORE, render
from tiny_pipelines import PIPELINES


def test_the_page_is_what_the_results_render_to() -> None:
    page, found = PAGE.read_text(encoding="utf-8"), STORE.read()
    assert page.partition(BEGIN)[2].partition(END)[0] == render(found), "run `make diffusion`"
    assert found["pipelines"].keys() <= PIPELINES.keys()
