"""Optimum, in an environment of its own: export a diffusion pipeline, run it beside eager.

    python optimum_diffusion.py PIPELINE HEIGHT WIDTH

Prints what became of the export, and of the pictures at that size, with two prompts and at twice
the size, as JSON: `right` where they differ by rounding.  Rounding of one step of a picture of 8
bits is 0.004.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import optimum.version
import torch
import transformers
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTDiffusionPipeline

CLOSE = 0.004


def as_older_versions_read_it(folder: str, copy: Path) -> Any:
    """The pipeline, and a copy of its folder with the weights that these versions load."""
    shutil.copytree(folder, copy)
    for file in copy.rglob("*.json"):
        text = file.read_text("utf-8")
        file.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")
    pipe = diffusers.DiffusionPipeline.from_pretrained(copy)
    pipe.save_pretrained(copy)
    return pipe


def pictures(pipe: Any, prompts: list[str], height: int, width: int) -> np.ndarray:
    made = pipe(
        prompts,
        height=height,
        width=width,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    )
    return np.asarray(made[0])


def first_line(error: Exception) -> str:
    return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def main() -> None:
    folder, height, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    asked = {
        "example": (["a fox"], height, width),
        "batch": (["a fox", "a red house"], height, width),
        "sizes": (["a fox"], 2 * height, 2 * width),
    }
    parts = (diffusers, transformers, optimum.version)
    found = {part.__name__.partition(".")[0]: part.__version__ for part in parts}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            eager = as_older_versions_read_it(folder, Path(scratch) / "model")
            engines = Path(scratch) / "engines"
            main_export(
                Path(scratch) / "model", engines, task="text-to-image", library_name="diffusers"
            )
            engines = ORTDiffusionPipeline.from_pretrained(engines)
        except Exception as error:  # optimum raises any kind
            print(json.dumps({**found, **dict.fromkeys(asked, first_line(error))}))
            return
        for where, call in asked.items():
            try:
                off = float(np.abs(pictures(engines, *call) - pictures(eager, *call)).max())
            except Exception as error:
                found[where] = first_line(error)
                continue
            found[where] = "right" if off <= CLOSE else f"wrong: off by {off:.2g}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
