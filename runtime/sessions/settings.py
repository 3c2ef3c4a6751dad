"""Settings of a session that affect speed and memory; they change outputs only by rounding."""

from typing import Annotated, Literal

from msgspec import Meta

from enginecast.runtime.bundle.manifest import Record


class Settings(Record, frozen=True, kw_only=True):
    """Settings of a session that differ from its defaults."""

    threads: Annotated[int, Meta(ge=1)] | None = None
    """Within one operator; None: as many as there are cores."""
    spinning: bool = True
    """Whether threads that wait for work keep their cores busy."""
    arena: bool = True
    """Whether memory is kept for the next run, where the precision lets it be."""
    memory_pattern: bool = True
    """Whether the memory of a run is planned from the last run of the same sizes."""
    graph: Literal["all", "extended", "basic"] = "all"
    """What ONNX Runtime's own optimizer may do."""
    prepack: bool = True
    """Whether weights are copied into the order that kernels read fastest; False: they stay as the
    file is mapped, and processes share them."""
    parallel: bool = False
    """Whether ops that do not need one another run at the same time."""

    fixed_sizes: bool = False
    """Whether the model is compiled again for each set of sizes that comes, the last few of which
    are kept; False: once, for the whole range."""

    def __str__(self) -> str:
        threads = {None: "", 1: "1 thread"}.get(self.threads, f"{self.threads} threads")
        changed = (
            threads,
            "" if self.spinning else "no spinning",
            "" if self.arena else "no arena",
            "" if self.memory_pattern else "no memory pattern",
            "" if self.graph == "all" else f"graph {self.graph}",
            "" if self.prepack else "no prepacking",
            "parallel" if self.parallel else "",
            "compiled for each size" if self.fixed_sizes else "",
        )
        return ", ".join(filter(None, changed)) or "default"


DEFAULT = Settings()
