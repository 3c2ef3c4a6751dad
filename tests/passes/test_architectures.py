"""The matrix of architectures: complete, sourced, packaged, and what a refusal says."""

from pathlib import Path

import pytest
import torch
from programs import Function, captured, rewritten

from enginecast.errors import PassError, SpecError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.quantize.plan.architectures import (
    COLUMNS,
    matrix,
)
from enginecast.passes.registry import build

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


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("plan-int8{mode=storage bits=4 arch=sm75", "no int4 weights in TensorRT: TensorRT-RTX"),
        ("plan-fp8{mode=storage bits=4 arch=sm89", "no NVFP4 weights in TensorRT: FP4 begins with"),
        ("plan-fp8{mode=storage block=32 arch=sm90", "no MXFP8 weights in TensorRT: block scales"),
        ("plan-fp8{mode=storage arch=sm80", "no fp8 in TensorRT: fp8 begins with Ada"),
        ("plan-int8{arch=gfx942", "no int8 in TensorRT: TensorRT is for NVIDIA's GPUs"),
    ],
)
def test_what_tensorrt_has_not_on_an_architecture_is_refused(spec: str, words: str) -> None:
    refused = refusal(f"{spec} target=tensorrt}}")
    assert words in refused.message
    assert refused.hint.startswith("It can do: ")
    assert "storage" not in refused.hint


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("plan-fp8{bits=4 target=tensorrt arch=sm120}", "bits=4 is for mode=storage only"),
        ("plan-fp8{mode=storage bits=4 arch=sm120}", "{bits=4} is for target=tensorrt"),
        ("plan-fp8{mode=storage block=32 target=tensorrt}", "{block=32} is for target=tensorrt"),
        ("plan-fp8{mode=storage bits=4 block=32 target=tensorrt arch=sm120}", "blocks of its own"),
    ],
)
def test_options_that_do_not_fit(spec: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        build(spec)
    assert words in str(refused.value)


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
    return [
        f"| architecture | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *rows,
        *sources,
    ]
