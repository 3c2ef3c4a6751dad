"""The passes: one file per pass, the registry, the presets, and nothing else at this level.

What they are made of is in `ir`, what they ask in `analyses`; `precision`, `quantize` and `lower`
are families. It knows no engine: it must not import `capture`, `exporters`, `runtime` or `verify`.
"""

if __name__ != "enginecast.passes":
    raise ImportError(
        "import enginecast.passes, not passes: the bare name is a second copy of every class"
    )

from typing import TYPE_CHECKING

from enginecast.public import importing, listing

if TYPE_CHECKING:
    from enginecast.passes.ir.base import GraphPass as GraphPass
    from enginecast.passes.ir.base import Pass as Pass
    from enginecast.passes.ir.base import PassContext as PassContext
    from enginecast.passes.ir.base import Site as Site
    from enginecast.passes.ir.sites import SiteLog as SiteLog

_WHERE = {
    "GraphPass": "enginecast.passes.ir.base:GraphPass",
    "Pass": "enginecast.passes.ir.base:Pass",
    "PassContext": "enginecast.passes.ir.base:PassContext",
    "Site": "enginecast.passes.ir.base:Site",
    "SiteLog": "enginecast.passes.ir.sites:SiteLog",
}
__all__ = ["GraphPass", "Pass", "PassContext", "Site", "SiteLog"]
__dir__ = listing(__all__)
if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _WHERE)
