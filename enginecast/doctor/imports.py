"""Whether the installed libraries import, tried in a process of its own, which may crash."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

from enginecast.errors import MissingError
from enginecast.installation import unimportable

LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "safetensors.numpy",
    "tokenizers",
    "onnxruntime",
    "torch",
    "torchvision",
    "torchaudio",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "transformers.modeling_utils",
    "diffusers.models.modeling_utils",
    "pyarrow.parquet",
    "datasets",
    "openvino",
    "model_signing.verifying",
    "flash_attn",
    "bitsandbytes",
    "xformers",
)
"""What the commands import, and what torch, transformers and diffusers import where it is there."""
SECONDS = 120.0
"""For all of them; with a warm disk they take 5 to 10."""
_CODE = "import sys; from enginecast.doctor.imports import report; report(sys.argv[1:])"


def broken_libraries() -> list[MissingError]:
    """One error for each installed library that does not import, with the command that repairs it.

    Takes seconds, two minutes at most: torch and transformers are imported.
    """
    here = [name for name in LIBRARIES if _installed(name.partition(".")[0])]
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, *here],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    in_time = True
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        in_time = False
        process.kill()
        printed, _ = process.communicate()
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    broken: dict[str, MissingError] = {}
    for one in lines:  # the first failure is the cause: others meet what is half imported
        if "what" in one:
            broken.setdefault(one["of"], MissingError(one["what"], hint=one["hint"]))
    if process.returncode and here:
        name = lines[-1]["library"] if lines else here[0]
        broken[name] = _crashed(name, process.returncode) if in_time else _slow(name)
    return list(broken.values())


def _crashed(name: str, code: int) -> MissingError:
    return MissingError(
        f"Python crashed while it imported {name} (exit code {code})",
        hint=f"pip install --force-reinstall --no-deps {name.partition('.')[0]}",
    )


def _slow(name: str) -> MissingError:
    return MissingError(
        f"after {SECONDS:.0f} seconds the import of {name} had not ended; what comes after it was "
        "not tried",
        hint=f"python -X importtime -c 'import {name}' shows what takes the time",
    )


def report(libraries: list[str]) -> None:
    """Import each library; print a line of JSON before, and one where it failed."""
    for name in libraries:
        print(json.dumps({"library": name}), flush=True)
        try:
            import_module(name)
        except Exception as error:
            found = unimportable(error) or MissingError(f"{name} does not import: {error}")
            of = found.details.get("library", name)
            line = {"library": name, "of": of, "what": found.message, "hint": found.hint}
            print(json.dumps(line), flush=True)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
