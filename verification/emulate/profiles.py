"""How a target's kernels compute in low precision: what they keep in fp32, and what they round in
between.  Data, with a source for every entry.

A kernel reads values of the storage dtype and writes its result rounded to it.  What differs is
what lies between: whether the steps of a norm, a softmax or an attention are rounded one by one.

All of them keep sums in fp32: ONNX Runtime on CUDA (CudaGemmOptions default 32F in
test/providers/cuda/test_cases; AccumulationType<half> is float in core/providers/cuda/reduction),
TensorRT (strongly typed networks), torch (opmath_type) and numpy (HALF_matmul_inner_noblas of
matmul.c.src, HALF_pairwise_sum of loops_utils.h.src).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from enginecast.errors import UsageError

How = Literal["fp32", "stored", "storage"]
"""Internal arithmetic of a kernel: "fp32": all in fp32, with one rounding of the result; "stored":
each intermediate tensor computed in fp32 and stored in the storage dtype; "storage": every step is
rounded."""


@dataclass(frozen=True)
class Rule:
    """The arithmetic of one kind of kernel, and its source."""

    how: How
    source: str


@dataclass(frozen=True)
class Profile:
    """One target's arithmetic."""

    name: str
    about: str
    norm: Rule
    """Layer norm and RMS norm, also fused with the residual sum before it."""
    softmax: Rule
    attention: Rule
    activation: Rule
    """GELU."""


_ORT = "microsoft/onnxruntime, onnxruntime/"
_TORCH = "pytorch, aten/src/ATen/native/cpu: opmath_type of Half and BFloat16 is float"
_TENSORRT = "NVIDIA TensorRT 11 API reference"
_INDUCTOR = (
    "pytorch, torch/_inductor/codegen: low precision is loaded as float, computed and stored"
)
_OPENVINO = (
    "openvino, src/plugins/intel_cpu: kernels of oneDNN and its own load bf16 as float, and round"
    " what they store"
)
_NUMPY = "onnx.reference, onnx/reference/ops: numpy of dtype float16, op by op"


def _same(name: str, about: str, how: How, source: str, **others: Rule) -> Profile:
    rule = Rule(how, source)
    kinds = ("norm", "softmax", "attention", "activation")
    return Profile(name, about, *(others.get(kind, rule) for kind in kinds))


_ALL = (
    Profile(
        name="ort-cuda",
        about="ONNX Runtime 1.28 and later on CUDA: fp32 sums; attention stores scores and weights,"
        " GELU rounds its steps",
        norm=Rule(
            "fp32",
            _ORT + "core/providers/cuda/nn/layer_norm.cc: float between MLFloat16 types; skip norm:"
            " microsoft/onnxruntime#28682, fp32 accumulation since 1.28",
        ),
        softmax=Rule("fp32", _ORT + "core/providers/cuda/math/softmax.h: AccumulationType"),
        attention=Rule(
            "stored",
            _ORT + "contrib_ops/cuda/bert/attention_softmax.cu: scores and weights of type T, the"
            " bias is added in float; core/providers/cuda/llm/attention.cc takes this path",
        ),
        activation=Rule(
            "storage",
            _ORT + "core/providers/cuda/cu_inc/common.cuh: _Gelu(half) multiplies and adds halves",
        ),
    ),
    _same(
        "tensorrt",
        "TensorRT: strongly typed, fp32 sums, norms computed in fp32",
        "fp32",
        f"{_TENSORRT}: strongly typed networks; kernels round what they write",
        norm=Rule("fp32", f"{_TENSORRT}: INormalizationLayer::setComputePrecision, default kFLOAT"),
    ),
    _same(
        "torch-cpu",
        "torch's own kernels on the CPU: fp32 inside, one rounding at the end",
        "fp32",
        _TORCH,
    ),
    _same(
        "inductor",
        "Inductor's kernels, and torch's that they call: fp32 inside, one rounding at the end",
        "fp32",
        f"{_INDUCTOR}; {_TORCH}",
    ),
    _same(
        "openvino",
        "OpenVINO on the CPU: fp32 inside, one rounding at the end",
        "fp32",
        _OPENVINO,
    ),
    _same(
        "onnx-reference",
        "onnx.reference on numpy halves: every step of a composite op is rounded",
        "storage",
        _NUMPY,
        norm=Rule(
            "stored",
            f"{_NUMPY}; epsilon is a numpy float32, so what follows the statistics is fp32",
        ),
    ),
)
PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in _ALL}


def get_profile(name: str) -> Profile:
    """The profile of this name.

    Raises:
        UsageError: no profile has this name.
    """
    if name not in PROFILES:
        raise UsageError(f"no arithmetic profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]
