"""The machine and the versions that figures were taken with, and the folder of the figures."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from enginecast.doctor.checks import cpu_class
from enginecast.runtime.device.machine import processor

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "torchao",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt-cu13",
    "torch-tensorrt",
    "numpy",
)


def machine(commit: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to read the figures."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = {
        "commit": commit or git.stdout.strip() or None,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "processor": processor(),
        "cpu_class": cpu_class(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_bytes"] = properties.total_memory
        found["capability"] = list(torch.cuda.get_device_capability())
        found["cuda"] = torch.version.cuda
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
