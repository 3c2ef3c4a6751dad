"""Inputs derived from configs, examples and files, and the cases of a verdict."""

import os
from pathlib import Path

import pytest
import torch
from models import (
    VOCABULARY,
    add_tokenizer,
    t5_config,
    tiny_t5,
)
from safetensors.torch import save_file

from enginecast.capture.inputs.derive.from_facts import from_facts
from enginecast.capture.inputs.derive.model_facts import ModelFacts
from enginecast.capture.inputs.examples import verification_inputs
from enginecast.capture.inputs.given import given_prompts, read_inputs
from enginecast.capture.inputs.specs import (
    DimSpec,
    InputSpec,
    from_example,
)
from enginecast.capture.sources.open_source import open_source
from enginecast.errors import SourceError, UsageError

TEXT = from_facts(ModelFacts(t5_config(), ("input_ids", "attention_mask")))


@pytest.mark.parametrize(
    ("most", "parameters", "expected"),
    [
        (512, 10**6, [(1, 512, 512), (1, 256, 1), (1, 512, 1)]),
        (77, 10**6, [(1, 77, 77), (1, 77, 1)]),
        (4096, 7 * 10**7, [(1, 256, 256), (1, 256, 1)]),
        (64, 10**6, []),
        (512, 10**9, []),
        (512, 0, [(1, 512, 512), (1, 256, 1), (1, 512, 1)]),
    ],
)
def test_corners_of_long_texts_are_verified_as_far_as_the_work_allows(
    most: int, parameters: int, expected: list[tuple[int, int, int]]
) -> None:
    dims = (DimSpec("batch", 3, 1, 8), DimSpec("sequence", 7, 1, most))
    specs = (
        InputSpec("input_ids", "token_ids", torch.int64, dims, 0, 9),
        InputSpec("attention_mask", "attention_mask", torch.int64, dims, 0, 1),
    )
    usual = {case.name for case in verification_inputs(specs, 0)}
    made = verification_inputs(specs, 0, parameters=parameters)
    cases = [c for c in made if c.name not in usual and not c.name.startswith("largest ")]
    masks = [case.inputs["attention_mask"] for case in cases]
    assert [(*mask.shape, int(mask.sum())) for mask in masks] == expected
    pads = [f"empty prompt, {tokens - 1} pads" for _, tokens, real in expected if real == 1]
    assert [case.name for case in cases] == ["longest", *pads][: len(expected)]


def test_inputs_from_a_file(tmp_path: Path) -> None:
    source = open_source(str(tiny_t5(tmp_path / "t5")))
    file = tmp_path / "inputs.safetensors"
    save_file({"input_ids": torch.ones(2, 4).long(), "pixels": torch.ones(1)}, file)
    specs = from_example(read_inputs(file), source.config)
    assert [spec.kind for spec in specs] == ["token_ids", "tensor"]
    assert specs[0].high == VOCABULARY - 1
    with pytest.raises(UsageError, match="t5 takes no input 'pixels'"):
        source.check_arguments(read_inputs(file), f"--inputs {file}")
    with pytest.raises(UsageError, match=r"absent\.safetensors cannot be read"):
        read_inputs(tmp_path / "absent.safetensors")
    file.write_bytes(b"1234567890")
    with pytest.raises(UsageError, match=r"inputs\.safetensors cannot be read"):
        read_inputs(file)


def test_prompts_are_padded_on_the_right_and_cut(tmp_path: Path) -> None:
    folder = add_tokenizer(tiny_t5(tmp_path / "t5"))
    source = open_source(str(folder))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c\n\nb\n")
    assert given_prompts(prompts) == ["a b c", "", "b"]
    inputs = source.encode(given_prompts(prompts), TEXT)
    assert inputs is not None
    assert inputs["input_ids"].tolist() == [[2, 3, 4, 1], [1, 0, 0, 0], [3, 1, 0, 0]]
    assert inputs["attention_mask"].sum(1).tolist() == [4, 1, 2]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match=r"tokenizer\.json cannot be read"):
        source.encode(["a"], TEXT)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        open_source(str(folder)).encode(["a"], TEXT)
    with pytest.raises(UsageError, match=r"--prompts .*absent\.txt: No such file"):
        given_prompts(tmp_path / "absent.txt")


def test_prompts_of_a_pipe_are_read_once() -> None:
    for text in (b"a\nb\n", b"c\n"):
        out, into = os.pipe()  # as of `--prompts <(head FILE)`
        os.write(into, text)
        os.close(into)
        path = Path(f"/dev/fd/{out}")
        assert given_prompts(path) == given_prompts(path) == text.decode().split()
        os.close(out)
