"""The matrix of architectures: complete, sourced, packaged, and what a refusal says."""

from pathlib import Path

import pytest
import torch
from programs import Function, captured, rewritten

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.quantize.plan.architectures import (
    COLUMNS,
    matrix,
)

ROOT = Path(__file__).parents[2]
ROWS = [
    "sm75",
    "sm80",
    "sm86",
    "sm89",
    "sm90",
    "sm100",
    "sm103",
    "sm120",
    "gfx942",
    "gfx950",
    "cpu",
]


def test_every_row_and_column_is_there_and_every_cell_says_where_it_can_be_read() -> None:
    found = matrix()
    assert list(found.architectures) == ROWS
    for name, row in found.architectures.items():
        for column in COLUMNS:
            cell = row.cell(column)
            source = found.sources[cell.source]
            assert cell.note, (name, column)
            assert source.name, (name, column)
            assert source.url.startswith("https://"), (name, column)
    assert {row.cell(c).source for row in found.architectures.values() for c in COLUMNS} == set(
        found.sources
    )


def refusal(spec: str) -> PassError:
    program = captured(Function(lambda x: x @ x.T), torch.ones(2, 3))
    with pytest.raises(PassError) as refused:
        rewritten(program, spec, PassContext())
    return refused.value


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm86"])
def test_native_fp8_where_there_is_none_names_what_there_is(arch: str) -> None:
    refused = refusal(f"plan-fp8{{arch={arch}}}")
    assert f"{arch} (" in refused.message
    assert "wants compute capability 8.9" in refused.message
    assert "ScaledBlas.cpp" in refused.message
    assert "It can do: storage." in refused.hint
    assert "mode=storage" in refused.hint


@pytest.mark.parametrize("spec", ["plan-fp8", "plan-fp8{mode=storage}", "plan-int8"])
def test_an_unknown_architecture_lists_the_known_ones(spec: str) -> None:
    name, _, options = spec.partition("{")
    refused = refusal(f"{name}{{arch=sm91 {options or '}'}")
    assert "arch='sm91' is not known" in refused.message
    assert "Did you mean 'sm9" in refused.hint
    assert all(row in refused.hint for row in ROWS)


def test_the_table_of_the_docs_is_that_of_the_file() -> None:
    page = (ROOT / "docs" / "how-it-works" / "quantization.md").read_text(encoding="utf-8")
    for line in table_lines():
        assert line in page.splitlines(), line


def table_lines() -> list[str]:
    """The matrix in Markdown."""
    rows = [
        f"| {name} ({row.name}) | {' | '.join(row.cell(c).supported for c in COLUMNS)} |"
        for name, row in matrix().architectures.items()
    ]
    sources = [f"* {source.name}: {source.url}" for source in matrix().sources.values()]
    return [f"| architecture | {' | '.join(COLUMNS)} |", "|---" * 7 + "|", *rows, *sources]
