"""However a T5 was saved, loaded and captured, unify-dtype leaves the same program."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from programs import TOKENS, Text, captured, count, notes, outputs, program_of, prompts, rewritten
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from transformers import T5EncoderModel

from enginecast.capture.sources.open_source import open_source
from enginecast.passes.captured.bind_weights import BindWeights
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import dtype_of, value, weight_expressions
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.precision.inf_clamps import find_inf_clamps

SAVED: dict[str, Callable[[Path], Any]] = {
    "fp32": lambda folder: models.tiny_t5(folder),
    "bf16": lambda folder: models.tiny_t5(folder, dtype=torch.bfloat16),
    "fp16 with wo in fp32": lambda folder: models.tiny_t5(folder, dtype=torch.float16),
    "half": lambda folder: halved(models.tiny_t5(folder, dtype=torch.float16)),
}
LOADED: dict[str, Callable[[Path], Any]] = {
    "dtype=float16": lambda folder: T5EncoderModel.from_pretrained(folder, dtype=torch.float16),
    "half()": lambda folder: T5EncoderModel.from_pretrained(folder, dtype=torch.float32).half(),
    "dtype=bfloat16": lambda folder: T5EncoderModel.from_pretrained(folder, dtype=torch.bfloat16),
    "dtype=float32": lambda folder: T5EncoderModel.from_pretrained(folder, dtype=torch.float32),
}
CLAMPS = {"dtype=float16": 1, "half()": 4, "dtype=bfloat16": 0, "dtype=float32": 0}


def halved(folder: Path) -> Path:
    T5EncoderModel.from_pretrained(folder).half().save_pretrained(folder)
    return folder


def capture_t5(model: Any) -> ExportedProgram:
    return captured(Text(model.eval().requires_grad_(False)), *prompts(3, 7), dynamic=TOKENS)


def skeleton(program: ExportedProgram) -> list[str]:
    """What a program computes, without names, and without how its weights come to their dtype."""
    weights = weight_expressions(program)
    order = [n for n in program.graph.nodes if n not in weights and n.op != "placeholder"]
    place = {node: f"%{index}" for index, node in enumerate(order)}

    def named(node: Node) -> str:
        found = value(node)
        shape = list(found.shape) if isinstance(found, Tensor) else ""
        return place.get(node, f"{node.name if node not in weights else ''}{dtype_of(node)}{shape}")

    return [
        f"{node.target} {dtype_of(node)} {torch.fx.map_arg((node.args, node.kwargs), named)}"
        for node in order
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ExportedProgram:
    folder = models.tiny_t5(tmp_path_factory.mktemp("plain"))
    return capture_t5(T5EncoderModel.from_pretrained(folder))


@pytest.mark.parametrize("saved", ["fp16 with wo in fp32"])
@pytest.mark.slow
def test_files_of_every_dtype_end_in_one_program(
    tmp_path: Path, plain: ExportedProgram, saved: str
) -> None:
    SAVED[saved](tmp_path)
    model = T5EncoderModel.from_pretrained(tmp_path, dtype=torch.float32)
    program = capture_t5(model)
    stored = open_source(str(tmp_path)).weights()
    names = {name: stored[name.removeprefix("model.")] for name in program.state_dict}
    run_pipeline([BindWeights()], program, PassContext(weights=names))
    for to in ("fp16", "bf16"):
        after, _ = rewritten(program, f"unify-dtype{{to={to}}},canonicalize")
        wanted, _ = rewritten(plain, f"unify-dtype{{to={to}}},canonicalize")
        assert skeleton(after) == skeleton(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", LOADED)
def test_modules_of_every_dtype_end_in_one_program(
    tmp_path: Path, plain: ExportedProgram, loaded: str
) -> None:
    models.tiny_t5(tmp_path)
    program = capture_t5(LOADED[loaded](tmp_path))
    assert len(find_inf_clamps(program)) == CLAMPS[loaded]
    after, _ = rewritten(program, "unify-dtype{to=fp16},canonicalize")
    wanted, _ = rewritten(plain, "unify-dtype{to=fp16},canonicalize")
    assert skeleton(after) == skeleton(wanted)
    assert count(after, "isinf", "clamp") == 0


def scalar_clamp(x: Tensor) -> Tensor:
    return x.half().relu().clamp(-64504, 64504)


def test_clamps_to_a_number_are_found_and_others_are_left() -> None:
    before = program_of(scalar_clamp, torch.randn(2, 5))
    assert len(find_inf_clamps(before)) == 1
    after, sites = rewritten(before, "unify-dtype{to=fp16}")
    assert count(after, "clamp") == 0
    assert "the source's inf-clamp dropped: it is there in fp16 alone" in notes(sites)
    (found,) = outputs(after, torch.full((2, 5), 65504.0))
    assert found.max() == 65504
    for function in (lambda x: x.clamp(-64504, 64504), lambda x: x.half().clamp(-1, 65504)):
        other = program_of(function, torch.randn(2, 5))
        assert find_inf_clamps(other) == ()
        assert count(rewritten(other, "unify-dtype{to=fp16}")[0], "clamp") == 1
