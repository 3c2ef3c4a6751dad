"""What the rules of `shrink` cannot know, by model type: fields of the tiny config.

Dotted names reach into sub-configs.  This is data of the test; the product has no such table.
"""

import json
from pathlib import Path
from typing import Any

OVERRIDES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
