"""What a folder of a pipeline is: one that diffusers saved, or one of engines."""

import os
from pathlib import Path
from typing import Literal

from enginecast.runtime.bundle.manifest import MANIFEST_NAME

INDEX = "model_index.json"
"""Of the folder of a pipeline, as diffusers writes it; a folder of engines has it, too."""
RECORD = "enginecast.json"
"""Of a folder of engines."""


def pipeline_at(path: Path) -> Literal["engines", "source"] | None:
    """Which kind of pipeline a folder holds; None: no pipeline."""
    if os.path.isfile(path / MANIFEST_NAME):  # False, too, for a name that no file can have
        return None
    if os.path.isfile(path / RECORD):
        return "engines"
    return "source" if os.path.isfile(path / INDEX) else None
