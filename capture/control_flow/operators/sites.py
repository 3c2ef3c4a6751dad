"""The places where code was rewritten, and what each became at run time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from enginecast.errors import CaptureError


@dataclass
class Site:
    """One statement or expression that was rewritten or left alone."""

    file: str
    line: int
    function: str
    was: str
    """The original construct, such as "if" or "while"."""
    column: int = 0
    became: str = ""
    """The result, such as "torch.cond"; empty until it ran, or if it was refused."""
    reason: str = ""
    """Why it was left as it is or refused; empty otherwise."""
    effects: tuple[str, ...] = ()
    """Side effects of its statements besides binding names, such as "sets self.calls"."""
    drops: bool = False
    """Whether one of its paths drops a tensor that the program keeps on both."""

    def refuse(self, reason: str) -> "RewriteRefused":
        """Record the reason, and return the error to raise."""
        self.became, self.reason = "", reason
        return RewriteRefused(self, reason)

    def done(self, became: str) -> None:
        """Record what it became; a result that depends on data takes precedence."""
        if self.became in SETTLED:
            self.became, self.reason = became, ""


class RewriteRefused(CaptureError):  # noqa: N818, said of a place and no fault of the program
    """A place that cannot become structured control flow; the message names file and line."""

    def __init__(self, site: Site, reason: str) -> None:
        super().__init__(
            f"{site.file}:{site.line}: this {site.was} in {site.function} depends on the values of "
            f"tensors and cannot become structured control flow: {reason}"
        )
        self.site = site
        self.reason = reason


PYTHON = "Python"
"""The result at a place whose predicate is a plain value."""
NOTHING = "nothing: neither path computes anything"
SETTLED = ("", PYTHON, NOTHING)
"""Results of a place without a path to verify."""


_running: list[tuple[Sequence[Site], nn.Module]] = []


@contextmanager
def running(sites: Sequence[Site], module: nn.Module) -> Iterator[None]:
    """Within the block, rewritten code refers to its places by index in `sites`."""
    _running.append((sites, module))
    try:
        yield
    finally:
        _running.pop()


def site_of(index: int) -> Site:
    """The place with this index."""
    return _running[-1][0][index]


def running_module() -> nn.Module:
    """The module that runs rewritten code, of which no branch may change the state."""
    return _running[-1][1]
