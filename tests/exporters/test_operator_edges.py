"""Operators of torch's own database, lowered and run: equal to eager or refused, on its samples and
on zeros, tiny, large, shifted, whole and half numbers.
"""

from pathlib import Path

import pytest
import torch
from lowering import lower, run
from onnxruntime.capi import onnxruntime_pybind11_state as state
from operator_database import FLOATS, INTEGERS, OPERATORS, difference, samples
from programs import captured
from slow_cases import some_slow

from enginecast.errors import LoweringError

REFUSALS = (
    LoweringError,
    *(state.Fail, state.InvalidGraph, state.NotImplemented, state.InvalidArgument),
)
"""Of ours, and of ONNX Runtime: an export reports both."""

BY_DEFAULT = ("diagonal", "maximum", "prod")
"""Those that ONNX Runtime or torch.onnx was found to be wrong for."""

LEFT_OUT = (
    *("_refs.", "torch.ops.", "fft.", "linalg.", "ldl", "jiterator", "masked.", "special."),
    *("linspace.tensor_overload", "logspace.tensor_overload"),
)
"""Families that ONNX has no form for, or that are other operators again; and two whose only step
is a number and not a list, which every case of an export shows.
"""

TIES = "torch leaves open which of equal elements comes first"
TRAINING = "training, which an export refuses"
EXCEPTIONS = {
    "topk": TIES,
    "kthvalue": TIES,
    "sort": TIES,
    "argsort": TIES,
    "msort": TIES,
    "bucketize": "boundaries out of order have no defined result",
    "searchsorted": "boundaries out of order have no defined result",
    "nn.functional.batch_norm": TRAINING,
    "native_batch_norm": TRAINING,
    "_native_batch_norm_legit": TRAINING,
    "_batch_norm_with_update": TRAINING,
    "_upsample_bilinear2d_aa": "scales beside sizes, which no public function gives",
    "addbmm": "integers that overflow are summed in another order",
    "_unsafe_masked_index": "indices out of range, where values are not defined",
    "_unsafe_masked_index_put_accumulate": "indices out of range, where values are not defined",
    "nn.functional.tanhshrink": "x - tanh(x) of tiny values is rounding alone",
    "nonzero": "an empty list of places in a number has another shape; every case shows it",
    "argwhere": "an empty list of places in a number has another shape; every case shows it",
    "nn.functional.multi_head_attention_forward": "dropout in training draws random numbers",
    "cov": "eager itself is rounding alone where all is equal",
    "corrcoef": "eager itself is rounding alone where all is equal",
}
"""What is not compared beyond the samples as they are given, and why."""

REST = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in OPERATORS
    if name not in BY_DEFAULT and not name.startswith(LEFT_OUT)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*some_slow(BY_DEFAULT, ["diagonal"]), *REST])
def test_an_operator_is_eager_or_refused(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    most = 1 if name in BY_DEFAULT and not request.config.option.markexpr else 3
    for dtype, styles in ((torch.float32, FLOATS), (torch.int64, INTEGERS)):
        if EXCEPTIONS.get(name) is TIES and dtype == torch.int64:
            continue
        changes = dict(list(styles.items())[: 1 if name in EXCEPTIONS else None])
        for index, sample in enumerate(samples(name, dtype, most)):
            folder = tmp_path / f"{dtype}-{index}"
            names = [f"out_{n}" for n in range(len(sample.module(*sample.inputs)))]
            try:
                program = captured(sample.module, *sample.inputs)
            except Exception:  # torch.export's refusals have no common base
                continue
            try:
                lower(program, folder, names)
                run(folder, *sample.inputs)
            except REFUSALS:
                continue
            for style, change in changes.items():
                inputs = sample.on(change, dtype)
                eager = sample.module(*(x.clone() for x in inputs))
                wide = (x.double() if x.is_floating_point() else x.clone() for x in inputs)
                for found in zip(run(folder, *inputs), eager, sample.module(*wide), strict=True):
                    problem = difference(*found)
                    assert not problem, f"{name} {sample.said}, {style}: {problem}"
