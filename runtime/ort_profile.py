"""Which operators ONNX Runtime executes, after its own optimiser went over the graph.

Asking the profiler writes no weights, unlike saving the optimised model.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginecast.runtime.arrays import Array
from enginecast.runtime.ort_session import CPU_PROVIDER, OrtSession, create_session, options_for

_KERNEL_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class ExecutedNode:
    """A node that ran."""

    name: str
    op_type: str
    """Operator without its domain, e.g. SkipSimplifiedLayerNormalization."""
    provider: str


def profile_ops(
    model_path: Path,
    feeds: Mapping[str, Array],
    *,
    providers: Sequence[str] = (CPU_PROVIDER,),
    threads: int | None = None,
    precision: str = "fp32",
    quantized: str = "",
) -> list[ExecutedNode]:
    """Run a model once and list the nodes that ran, in order; a loop's body once per turn.

    Raises:
        MissingError, BundleError: the model cannot be loaded.
        InputError: it cannot be run on these feeds.
    """
    with tempfile.TemporaryDirectory(prefix="enginecast-profile-") as folder:
        options = options_for(precision, providers[0], quantized)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "ops")
        session = create_session(model_path, providers, threads, options)
        try:
            outputs = [output.name for output in session.get_outputs()]
            OrtSession(session, providers[0], model_path.name).run(feeds, outputs)
        finally:
            profile = Path(session.end_profiling())
        events = json.loads(profile.read_bytes())
    return [
        ExecutedNode(
            name=event["name"].removesuffix(_KERNEL_SUFFIX),
            op_type=event["args"]["op_name"],
            provider=event["args"]["provider"],
        )
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL_SUFFIX)
    ]
