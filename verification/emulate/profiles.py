"""How a target's kernels compute in low precision: what they keep in fp32, and what they round in
between.  Data, with a source for every entry.

A kernel reads values of the storage dtype and writes its result rounded to it.  What differs is
what lies between: whether the steps of an attention or a GELU are rounded one by one. Norms and
softmax are computed in fp32 and rounded once by all of them (ONNX Runtime: layer_norm.cc and
softmax.h of core/providers/cuda, skip norms since microsoft/onnxruntime#28682; TensorRT:
INormalizationLayer::setComputePrecision).

All of them keep sums in fp32: ONNX Runtime on CUDA (CudaGemmOptions default 32F in
test/providers/cuda/test_cases; AccumulationType<half> is float in core/providers/cuda/reduction),
TensorRT (strongly typed networks) and torch (opmath_type).
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


def _in_fp32(name: str, about: str, source: str) -> Profile:
    rule = Rule("fp32", source)
    return Profile(name, about, rule, rule)


_ALL = (
    Profile(
        name="ort-cuda",
        about="ONNX Runtime 1.28 and later on CUDA: fp32 sums; attention stores scores and weights,"
        " GELU rounds its steps",
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
    _in_fp32(
        "tensorrt",
        "TensorRT: strongly typed, fp32 sums, norms computed in fp32",
        f"{_TENSORRT}: strongly typed networks; kernels round what they write",
    ),
    _in_fp32(
        "torch-cpu",
        "torch's own kernels on the CPU: fp32 inside, one rounding at the end",
        _TORCH,
    ),
    _in_fp32(
        "inductor",
        "Inductor's kernels, and torch's that they call: fp32 inside, one rounding at the end",
        f"{_INDUCTOR}; {_TORCH}",
    ),
    _in_fp32(
        "openvino",
        "OpenVINO on the CPU: fp32 inside, one rounding at the end",
        _OPENVINO,
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
