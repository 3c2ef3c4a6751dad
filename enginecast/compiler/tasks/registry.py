"""The task of each kind of source."""

from collections.abc import Mapping

from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.generation.decoder import TEXT_GENERATION
from enginecast.capture.sources.stateful import STATE
from enginecast.compiler.tasks.base import Task
from enginecast.compiler.tasks.generation import GenerationTask
from enginecast.compiler.tasks.stateful import StateTask

TASKS: Mapping[str, Task] = {
    "": Task(),
    STATE: StateTask(),
    TEXT_GENERATION: GenerationTask(),
}


def task_of(source: Source) -> Task:
    """What the engines of a model are called in turn for."""
    return TASKS[source.task]
