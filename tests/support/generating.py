"""What tests of engines that generate text share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import enginecast
from enginecast.compiler.request import ModelOptions
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.engine import Engine

Feeds = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Feeds], Mapping[str, np.ndarray[Any, Any]]]
"""Makes other inputs of some of an engine's."""
TASK = ModelOptions(kv_cache=True)


def export(model: PreTrainedModel, folder: Path, **options: Any) -> Bundle:
    return enginecast.compile(model, folder, options=TASK, **options)


def feed_otherwise(monkeypatch: pytest.MonkeyPatch, engine: Engine, change: Change) -> None:
    """Let an engine be fed what `change` makes of its inputs."""
    run = engine.run
    monkeypatch.setattr(
        engine, "run", lambda feeds, **more: run({**feeds, **change(feeds)}, **more)
    )
