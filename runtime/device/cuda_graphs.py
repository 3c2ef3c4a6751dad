"""Record runs with recurring shapes once and replay them: one CUDA graph per set of shapes.

    1st, 2nd run of (8, 512)     as it is
    3rd                          recorded
    4th and on                   inputs copied in, replayed, outputs copied out

The table of what was recorded knows nothing of CUDA; `recorder` does.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from enginecast.errors import first_line

Tensors = Sequence[Any]
Run = Callable[[Tensors], list[Any]]
Key = tuple[tuple[str, tuple[int, ...]], ...]

AFTER = 3
"""The run of the same shapes that is recorded: recording takes about as long as ten runs."""
LIMIT = 8
"""Most graphs that are kept; each holds the memory of one run."""
_COUNTED = 256
"""Most shapes whose runs are counted."""


def key_of(tensors: Tensors) -> Key:
    """The key of a recorded graph: dtypes and shapes."""
    return tuple((str(one.dtype), tuple(one.shape)) for one in tensors)


class GraphCache:
    """Calls `run`, or replays its recording; threads take turns."""

    def __init__(
        self,
        run: Run,
        record: Callable[[Run, Tensors], Run],
        *,
        after: int = AFTER,
        limit: int = LIMIT,
    ) -> None:
        """
        Args:
            run: computes outputs of inputs.
            record: runs `run` on copies of inputs, and returns what does the same for other inputs
                of these shapes; RuntimeError when it cannot.
            after: which run of the same shapes is recorded; at least 1.
            limit: graphs kept; the one not used for longest goes.
        """
        self._run = run
        self._record = record
        self._after = after
        self._limit = limit
        self._graphs: OrderedDict[Key, Run] = OrderedDict()
        self._counts: OrderedDict[Key, int] = OrderedDict()
        self._lock = threading.Lock()
        self.refused = ""
        """Why nothing is recorded any more; empty: it is."""

    @property
    def recorded(self) -> tuple[Key, ...]:
        """The keys of the recorded graphs, least recently used first."""
        return tuple(self._graphs)

    def __call__(self, tensors: Tensors) -> list[Any]:
        with self._lock:
            key = key_of(tensors)
            graph = self._graphs.get(key)
            if graph is None and not self.refused:
                count = self._counts.pop(key, 0) + 1
                self._counts[key] = count
                if len(self._counts) > _COUNTED:
                    self._counts.popitem(last=False)
                graph = self._try(key, tensors) if count >= self._after else None
            if graph is None:
                return self._run(tensors)
            self._graphs.move_to_end(key)
            return graph(tensors)

    def _try(self, key: Key, tensors: Tensors) -> Run | None:
        """Evict before recording, so that the old and the new graph are not held together."""
        while len(self._graphs) >= self._limit:
            self._graphs.popitem(last=False)
        try:
            graph = self._record(self._run, tensors)
        except RuntimeError as error:
            # What one run does that no graph can hold, such as reading a size, others do too.
            self.refused = first_line(error)
            warnings.warn(
                f"cannot record a CUDA graph, so runs continue without one: {self.refused}",
                stacklevel=4,
            )
            return None
        del self._counts[key]
        self._graphs[key] = graph
        return graph


def recorder(torch: Any, *, mode: str = "global") -> Callable[[Run, Tensors], Run]:
    """What records CUDA graphs; all of them share one pool of memory, since none run together.

    Args:
        torch: the module, with a GPU.
        mode: what CUDA forbids while it records: "global": what no graph can hold, whoever does
            it; "thread_local": what this thread does.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(run: Run, tensors: Tensors) -> Run:
        inputs = [one.clone() for one in tensors]
        before = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(before)
        with torch.cuda.stream(side):  # libraries set themselves up in a first run
            run(inputs)
        before.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=mode):
            outputs = run(inputs)

        def replay(given: Tensors) -> list[Any]:
            for own, one in zip(inputs, given, strict=True):
                own.copy_(one)
            graph.replay()
            return [one.clone() for one in outputs]

        return replay

    return record
