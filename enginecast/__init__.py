"""enginecast: capture, rewrite, lower and verify PyTorch models.

The public names load on first use, so that a server which only runs engines never imports torch.
"""

from typing import TYPE_CHECKING

from enginecast.public import importing, listing
from enginecast.version import __version__ as __version__

if TYPE_CHECKING:
    from enginecast import cache as cache
    from enginecast import errors as errors
    from enginecast import passes as passes
    from enginecast import runtime as runtime
    from enginecast import testing as testing
    from enginecast.api import compile as compile
    from enginecast.api import export as export
    from enginecast.api import record as record
    from enginecast.compiler.verify.bundle import verify_bundle as verify
    from enginecast.pipelines.attach import attach as attach
    from enginecast.runtime.load import load as load

_WHERE = {
    "attach": "enginecast.pipelines.attach:attach",
    "cache": "enginecast.cache",
    "compile": "enginecast.api:compile",
    "errors": "enginecast.errors",
    "export": "enginecast.api:export",
    "load": "enginecast.runtime.load:load",
    "passes": "enginecast.passes",
    "record": "enginecast.api:record",
    "runtime": "enginecast.runtime",
    "testing": "enginecast.testing",
    "verify": "enginecast.compiler.verify.bundle:verify_bundle",
}
__all__ = [
    "__version__",
    "attach",
    "cache",
    "compile",
    "errors",
    "export",
    "load",
    "passes",
    "record",
    "runtime",
    "testing",
    "verify",
]
__dir__ = listing(__all__)
if not TYPE_CHECKING:  # so that type checkers know the names above, and no others
    __getattr__ = importing(__name__, _WHERE)
