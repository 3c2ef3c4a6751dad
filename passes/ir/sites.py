"""Record what a pass did at each place it looked at, with keys that are stable between runs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext, Site
from enginecast.passes.ir.source import module_path, source_line
from enginecast.public import listing

__all__ = [
    "SiteLog",
]
__dir__ = listing(__all__)

SKIPPED = "left alone on request"
"""The reason of a site that `PassContext.skip` names."""


class SiteLog:
    """The sites of one run of one pass.

        log = SiteLog(context)
        for node in list(program.graph.nodes):
            if not has(node, Trait.CASTS) or log.skipped(node):
                continue
            if node.users:
                log.refused(node, "its value is used")
                continue
            erase(node)
            log.done(node)
        return log.sites

    A node becomes a site when it is first named here; name nodes in graph order.  Ordinals count
    the sites that share module and source, whatever their outcome, so skipping one does not
    renumber the rest.
    """

    def __init__(self, context: PassContext) -> None:
        self._skip = context.skip
        self._found: dict[Node, Site] = {}
        self._settled: set[Node] = set()
        self._ordinals: Counter[tuple[str, str]] = Counter(context.earlier)

    def skipped(self, node: Node) -> bool:
        """Whether the context wants this site left alone; if so, that is recorded."""
        if self._site(node).key not in self._skip:
            return False
        self._settle(node, reason=SKIPPED)
        return True

    def done(self, node: Node, note: str = "") -> None:
        """Record that the site was rewritten; before or after the node was erased."""
        self._settle(node, note=note)

    def refused(self, node: Node, reason: str) -> None:
        """Record that the site was left alone; a later `done` of the same node overrules it."""
        if not reason:
            raise PassError(f"site {self._site(node).key} was refused without a reason")
        self._settle(node, reason=reason)

    @property
    def sites(self) -> list[Site]:
        """Every site in the order it was first named.

        Raises:
            PassError: a site was looked at, and then neither rewritten nor refused.
        """
        for node, site in self._found.items():
            if node not in self._settled:
                raise PassError(
                    f"site {site.key} (node '{site.node}') was visited, but neither done nor"
                    " refused"
                )
        return list(self._found.values())

    def _site(self, node: Node) -> Site:
        if node not in self._found:
            module, source = module_path(node), source_line(node)
            ordinal = self._ordinals[module, source]
            self._ordinals[module, source] += 1
            self._found[node] = Site(node.name, module, source, ordinal=ordinal)
        return self._found[node]

    def _settle(self, node: Node, *, reason: str = "", note: str = "") -> None:
        self._found[node] = replace(self._site(node), reason=reason, note=note)
        self._settled.add(node)


def number(sites: Iterable[Site]) -> list[Site]:
    """Fill in the ordinals: 0, 1, ... in list order among sites that share module and source."""
    seen: Counter[tuple[str, str]] = Counter()
    numbered = []
    for site in sites:
        numbered.append(replace(site, ordinal=seen[site.module, site.source]))
        seen[site.module, site.source] += 1
    return numbered
