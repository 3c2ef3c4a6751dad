"""What a TensorRT plan asks of a machine: every mismatch is a sentence with both values."""

from types import SimpleNamespace
from typing import Any

import pytest

from enginecast.errors import MissingError
from enginecast.runtime.sessions.tensorrt.fitness import (
    portable_requirements,
    require_fit,
    require_portable_fit,
)

HERE = {
    "tensorrt": "11.0.0.114",
    "cuda": "13",
    "driver": "580.95.05",
    "platform": "linux x86_64",
    "gpu": "sm90",
    "gpu_name": "NVIDIA H200",
}
NEEDS = HERE | {"hardware": "none", "version_compatible": "no"}
INSTEAD = "Use the other engine."
A100 = {"gpu": "sm80", "gpu_name": "NVIDIA A100"}
H100 = {"gpu": "sm90", "gpu_name": "NVIDIA H100"}
T4 = {"gpu": "sm75", "gpu_name": "Tesla T4"}
B200 = {"gpu": "sm100", "gpu_name": "NVIDIA B200"}
COMPATIBLE = {"version_compatible": "yes"}
AMPERE = {"hardware": "ampere+"}
SAME = {"hardware": "same-capability"}

FITS = [
    ({}, {}),
    ({}, {"driver": "580.95.06"}),
    ({}, {"driver": "600.1"}),
    (COMPATIBLE, {}),
    (COMPATIBLE | {"tensorrt": "10.15.1.29"}, {}),
    (COMPATIBLE | {"tensorrt": "11.0.0.200"}, {}),
    (AMPERE | A100, {}),
    (AMPERE, A100),
    (AMPERE, B200),
    (SAME, H100),
]

MISFITS = [
    ({"tensorrt": "11.0.0.115"}, {}, ["built with TensorRT 11.0.0.115, and here is 11.0.0.114"]),
    ({"tensorrt": "11.0.0.114+fake"}, {}, ["with TensorRT 11.0.0.114+fake, and here is 11.0.0"]),
    ({"tensorrt": "10.15.1.29"}, {}, ["10.15.1.29, and here is 11.0.0.114", "version compatible"]),
    (COMPATIBLE, {"tensorrt": "10.15.1.29"}, ["11.0.0.114, and here is 10.15.1.29", "newer ones"]),
    (COMPATIBLE | {"tensorrt": "11.1.0.1"}, {}, ["11.1.0.1, and here is 11.0.0.114"]),
    ({"cuda": "12"}, {}, ["built for CUDA 12, and here is CUDA 13: its code calls"]),
    ({}, {"driver": "580.95.04"}, ["driver 580.95.05, and here is 580.95.04: an older driver"]),
    ({}, {"driver": "99.1"}, ["built with driver 580.95.05, and here is 99.1"]),
    ({"platform": "win32 AMD64"}, {}, ["built for win32 AMD64, and here is linux x86_64"]),
    ({}, H100, ["for NVIDIA H200 (sm90), and here is NVIDIA H100 (sm90)", "without hardware"]),
    ({}, {"gpu": "sm91"}, ["for NVIDIA H200 (sm90), and here is NVIDIA H200 (sm91)"]),
    (SAME, B200, ["for NVIDIA H200 (sm90), and here is NVIDIA B200 (sm100)", "same compute"]),
    (AMPERE, T4, ["for NVIDIA H200 (sm90), and here is Tesla T4 (sm75)", "Ampere (sm80)"]),
    ({"nonsense": "1"}, {}, ["asks for nonsense 1, which this enginecast does not know"]),
    ({"hardware": "all"}, {}, ["says hardware 'all', which cannot be read"]),
    ({"version_compatible": ""}, {}, ["says version_compatible '', which cannot be read"]),
    ({"tensorrt": "eleven"}, {}, ["says tensorrt 'eleven', which cannot be read"]),
    ({"driver": "new"}, {}, ["says driver 'new', which cannot be read"]),
    ({"gpu": "90"}, {}, ["says gpu '90', which cannot be read"]),
    ({"cuda": "12"}, {"driver": "1.0"}, ["CUDA 12, and here is CUDA 13", "here is 1.0"]),
]


@pytest.mark.parametrize(("needs", "here"), FITS)
def test_a_plan_that_fits(needs: dict[str, str], here: dict[str, str]) -> None:
    require_fit(NEEDS | needs, HERE | here, "engine.plan", INSTEAD)


@pytest.mark.parametrize(("needs", "here", "parts"), MISFITS)
def test_a_plan_for_another_machine(
    needs: dict[str, str], here: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(MissingError) as caught:
        require_fit(NEEDS | needs, HERE | here, "engine.plan", INSTEAD)
    assert all(part in caught.value.message for part in parts), caught.value.message
    assert caught.value.message.startswith("engine.plan: ")
    assert caught.value.hint == INSTEAD


@pytest.mark.parametrize("key", sorted(NEEDS))
def test_a_plan_that_does_not_say_all(key: str) -> None:
    needs = {name: value for name, value in NEEDS.items() if name != key}
    with pytest.raises(MissingError, match=f"does not say for which {key} it was built"):
        require_fit(needs, HERE, "engine.plan", INSTEAD)


TRT = SimpleNamespace(__version__="1.7.1.116")
PORTABLE = {"tensorrt-rtx": "1.7.1.116", "compute": "8.0 8.6 8.9 12.0+"}
LATER = "built for compute capability 8.0, 8.6, 8.9, 12.0 and newer, and the RTX here has "


def test_what_a_portable_plan_requires() -> None:
    assert portable_requirements(TRT, (), "") == PORTABLE
    assert portable_requirements(TRT, (), "fp8") == PORTABLE | {"compute": "8.9 12.0+"}
    assert portable_requirements(TRT, (), "nvfp4")["compute"] == "12.0+"
    assert portable_requirements(TRT, (), "int4") == PORTABLE
    assert portable_requirements(TRT, ("8.6", "12.0"), "")["compute"] == "8.6 12.0"


@pytest.mark.parametrize(
    ("needs", "capability", "said"),
    [
        ({}, "8.6", ""),
        ({}, "12.0", ""),
        ({}, "12.1", ""),
        ({"compute": "7.5"}, "7.5", ""),
        ({}, "7.5", f"{LATER}7.5"),
        ({}, "9.0", f"{LATER}9.0"),
        ({"compute": "8.6 12.0"}, "12.1", "built for compute capability 8.6, 12.0, and the RTX"),
        ({"tensorrt-rtx": "1.7.1.115"}, "8.6", "built with TensorRT-RTX 1.7.1.115, and here is"),
        ({"compute": "new"}, "8.6", "says compute 'new', which cannot be read"),
        ({"gpu": "sm86"}, "8.6", "asks for gpu sm86, which this enginecast does not know"),
    ],
)
def test_a_portable_plan(needs: dict[str, str], capability: str, said: str) -> None:
    gpu: Any = SimpleNamespace(name="RTX", capability=capability)
    if not said:
        require_portable_fit(TRT, gpu, PORTABLE | needs, "engine.plan", INSTEAD)
        return
    with pytest.raises(MissingError) as caught:
        require_portable_fit(TRT, gpu, PORTABLE | needs, "engine.plan", INSTEAD)
    assert caught.value.message.startswith(f"engine.plan: {said}")
    assert caught.value.hint == INSTEAD
