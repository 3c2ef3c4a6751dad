"""What `enginecast doctor` finds, on machines that are not this one."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from enginecast.cli.doctor import show
from enginecast.doctor import checks as doctor
from enginecast.doctor.checks import Gpu, Package, cpu_features, examine, find_problems
from enginecast.installation import install_command
from enginecast.runtime.device.versions import installed

TORCH = Package("torch", ">=2.11", "2.13.0+cu128")
ORT = Package("onnxruntime", ">=1.28", "1.31.1")
ORT_GPU = Package("onnxruntime-gpu", ">=1.28", "1.31.1", "cuda")
H100 = Gpu("NVIDIA H100", "sm90", 80 * 2**30)
CPU = ("CPUExecutionProvider",)
CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")


def problems(
    *packages: Package,
    providers: tuple[str, ...] = CPU,
    cuda: str | None = "12.8",
    gpus: tuple[Gpu, ...] = (),
    driver: bool = False,
) -> list[tuple[str, str]]:
    found = find_problems(packages, providers, cuda, gpus, driver=driver)
    return [(problem.what, problem.repair) for problem in found]


def test_both_builds_of_onnxruntime_are_a_problem() -> None:
    ((what, repair),) = problems(TORCH, ORT, ORT_GPU)
    assert "both installed" in what
    assert repair == (
        "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxruntime>=1.28'"
    )
    ((_, repair),) = problems(TORCH, ORT, ORT_GPU, providers=CUDA, gpus=(H100,))
    assert repair.endswith("pip install 'onnxruntime-gpu>=1.28'")


@pytest.mark.parametrize(
    ("version", "fits"),
    [(None, False), ("2.10.1", False), ("2.9", False), ("2.11.0", True), ("2.100+cpu", True)],
)
def test_required_package_that_is_missing_or_old(version: str | None, fits: bool) -> None:
    package = Package("torch", ">=2.11", version)
    assert package.fits == fits
    found = problems(package)
    assert found == [] if fits else found[0][1] == "pip install 'torch>=2.11'"
    assert problems(Package("ray", ">=2.50", None, "ray")) == []


def test_a_package_that_is_needed_with_optional_parts() -> None:
    (ray,) = [package for package in examine().packages if package.name == "ray"]
    assert (ray.wanted, ray.extra) == (">=2.50", "ray")
    missing = replace(ray, version=None)
    assert missing.repair == "pip install 'ray[data]>=2.50'"


def test_cpu_features(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_features(cpuinfo) == {}
    cpuinfo.write_text("Features\t: asimd bf16\n")
    assert cpu_features(cpuinfo) == {}
    cpuinfo.write_text("model name\t: x\nflags\t\t: fma avx2 avx512f avx_vnni amx_int8\n")
    assert {name for name, present in cpu_features(cpuinfo).items() if present} == {
        "avx2",
        "avx512",
        "vnni",
        "amx_int8",
    }


def test_this_machine_is_examined_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, dict[str, str]] = {"ray": {}, "torch": {"torch": "2.1.0"}}
    given |= {"tensorrt-cu13": {}, "torch-tensorrt": {}}  # whatever else is installed
    monkeypatch.setattr(doctor, "installed", lambda name: given.get(name, installed(name)))
    report = examine()
    assert "CPUExecutionProvider" in report.providers
    data = json.loads(json.dumps(report.to_json()))
    found = {package["name"]: package for package in data["packages"]}
    assert found["numpy"]["repair"] == ""
    assert found["ray"]["extra"] == "ray"
    assert "pytest" not in found
    assert [problem["repair"] for problem in data["problems"] if "torch 2.1.0" in problem["what"]]

    out = io.StringIO()
    show(report, Console(file=out, width=60))
    text = out.getvalue()
    assert f"to add 'tensorrt': {install_command('tensorrt')}" in text
    assert "problem: torch 2.1.0, >=2.11 is needed\n  pip install 'torch>=2.11'\n" in text
    assert "no problems" not in text
