"""What a TensorRT plan asks of a machine: every mismatch is a sentence with both values."""

import pytest

from enginecast.errors import MissingError
from enginecast.runtime.sessions.tensorrt.fitness import require_fit

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
