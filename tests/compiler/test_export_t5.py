"""T5 encoders of every form on disk become engines that agree with eager."""

import numpy as np
import pytest
import torch
from exports import Exports
from transformers import T5EncoderModel

from enginecast.runtime.bundle.manifest import Fusion
from enginecast.runtime.load import load

CASES = (
    "smallest",
    "ragged masks",
    "odd sizes",
    "empty prompt",
    "long",
    "longest",
    "empty prompt, 255 pads",
    "empty prompt, 511 pads",
    "smallest batch",
    "smallest sequence",
)


def fusions(exports: Exports, name: str, precision: str) -> dict[str, Fusion]:
    bundle = exports(name, precision).bundle
    assert bundle is not None
    return {found.kind: found for found in bundle.manifest.fusion}


@pytest.mark.parametrize(
    ("name", "precision", "outcome"),
    [
        ("t5", "fp32", "verified"),
        ("t5", "fp16", "verified-by-emulation"),
        pytest.param("t5-wo-in-fp32", "fp16", "verified-by-emulation", marks=pytest.mark.slow),
        ("t5", "bf16", "verified-by-emulation"),
        pytest.param("t5-4-half", "fp16", "verified-by-emulation", marks=pytest.mark.slow),
        pytest.param(
            "t5-relu-shards-bf16", "bf16", "verified-by-emulation", marks=pytest.mark.slow
        ),
    ],
)
def test_engines_agree_with_eager_within_its_own_error(
    exports: Exports, name: str, precision: str, outcome: str
) -> None:
    verdict = exports(name, precision).report.verdict
    assert verdict.outcome == outcome
    assert verdict.cases[: len(CASES)] == CASES  # sizes that the code tells apart come last
    (output,) = verdict.outputs
    assert output.ratio is not None
    assert output.ratio <= 3.0
    assert output.name == "last_hidden_state"


def test_a_bf16_engine_that_cannot_run_here_says_so(exports: Exports) -> None:
    done = exports("t5", "bf16")
    assert done.report.verdict.engine == "not run on target"
    assert {f.runtime for f in fusions(exports, "t5", "bf16").values()} == {None}


@pytest.mark.parametrize(
    ("name", "precision", "dtype"),
    [("t5", "fp32", torch.float32), ("t5", "fp16", torch.float16)],
)
def test_other_shapes_and_ragged_masks_judged_without_our_own_metrics(
    exports: Exports, name: str, precision: str, dtype: torch.dtype
) -> None:
    """Neither the shape nor the inputs are those that the export looked at."""
    ids = torch.randint(0, 96, (5, 23))
    mask = (torch.arange(23)[None, :] < torch.tensor([23, 19, 8, 3, 1])[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask}

    def eager(dtype: torch.dtype) -> torch.Tensor:
        model = T5EncoderModel.from_pretrained(exports.model(name), dtype=dtype).eval()
        with torch.no_grad():
            hidden: torch.Tensor = model(**inputs).last_hidden_state
        return hidden.double()[mask.bool()]

    truth = eager(torch.float64)
    with load(exports(name, precision).folder, require="verified-by-emulation") as engine:
        array = engine.run({key: value.numpy() for key, value in inputs.items()})
    hidden = torch.from_numpy(array["last_hidden_state"].astype(np.float64))[mask.bool()]
    floor = float((eager(dtype) - truth).norm())
    assert 0 < float((hidden - truth).norm()) <= 3 * floor
