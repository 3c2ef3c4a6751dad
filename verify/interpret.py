"""The interpreter of passes/, under the name that verification knows it by."""

from enginecast.passes.interpret import (
    Feed,
    Run,
    Watch,
    interpret,
    interpret_cases,
    named,
    output_names,
    schedule,
    written_placeholders,
)

__all__ = [
    "Feed",
    "Run",
    "Watch",
    "interpret",
    "interpret_cases",
    "named",
    "output_names",
    "schedule",
    "written_placeholders",
]
