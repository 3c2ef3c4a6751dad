"""Keep apex out of the model.

Releases of transformers before huggingface/transformers#45723 (May 2026) replace T5LayerNorm by
FusedRMSNorm of apex as they import T5, when apex is installed.  torch.export cannot trace that
(pytorch/pytorch#138196), and it needs a GPU.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn

from enginecast.errors import SourceError


@contextmanager
def without_apex() -> Iterator[None]:
    """Make `import apex` fail as if it were not installed, for the imports in the block."""
    absent = object()
    before: ModuleType | object | None = sys.modules.get("apex", absent)
    hidden = {name: m for name, m in sys.modules.items() if name.startswith("apex.")}
    for name in hidden:
        del sys.modules[name]
    sys.modules["apex"] = None  # type: ignore[assignment] # Python's way to say: cannot be imported
    try:
        yield
    finally:
        del sys.modules["apex"]
        sys.modules.update(hidden)
        if before is not absent:
            sys.modules["apex"] = before  # type: ignore[assignment] # None, if somebody hid it


def refuse_apex(module: nn.Module, name: str) -> None:
    """Raise SourceError when `module` was built from classes that apex had replaced already."""
    for path, part in module.named_modules():
        if type(part).__module__.split(".")[0] == "apex":
            raise SourceError(
                f"{name}: {path} is apex' {type(part).__name__}, which cannot be captured",
                hint="Open the model before anything else imports its transformers module, "
                "or uninstall apex.",
            )
