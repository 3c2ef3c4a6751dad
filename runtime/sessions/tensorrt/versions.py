"""Which versions of torch, torch_tensorrt and TensorRT work together; imports torch_tensorrt on
demand.

`versions.json` has what the wheels of torch_tensorrt require of one another, and the names
of torch_tensorrt that are called, both written by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from enginecast.errors import MissingError
from enginecast.runtime.device.versions import installed, short_version
from enginecast.runtime.sessions.tensorrt.library import Names, import_library, read_table


@dataclass(frozen=True)
class Pair:
    """Versions that were built for one another; each as MAJOR.MINOR."""

    torch: str
    torch_tensorrt: str
    tensorrt: str
    cuda: str
    """Major version alone."""
    source: str

    def __str__(self) -> str:
        return (
            f"torch {self.torch} with torch_tensorrt {self.torch_tensorrt} and TensorRT"
            f" {self.tensorrt} (CUDA {self.cuda})"
        )


@cache
def known_pairs() -> tuple[Pair, ...]:
    """All rows of the table, oldest first."""
    return tuple(Pair(**row) for row in read_table("versions.json")["pairs"])


def called_names(version: str) -> Names:
    """The names of torch_tensorrt that are called of a version of it; empty: it is not known."""
    found: Mapping[str, list[str]] = read_table("versions.json")["names"].get(
        short_version(version), {}
    )
    return {module: tuple(names) for module, names in found.items()}


def check_pair(
    torch: str, torch_tensorrt: str | None, tensorrt: str | None, *, cuda: str | None = None
) -> list[str]:
    """Incompatibilities, as sentences with both values; empty if there are none.

    Args:
        torch: its version: "2.13.0+cu130".
        torch_tensorrt, tensorrt: None: not installed, and not looked at.
        cuda: what torch was built for: "13.0"; None: not looked at.
    """
    row = next((pair for pair in known_pairs() if pair.torch == short_version(torch)), None)
    if row is None:
        known = ", ".join(pair.torch for pair in known_pairs())
        return [f"torch {torch}: expected one that a torch_tensorrt is known for: {known}"]
    wrong = []
    for name, wanted, found in (
        ("torch_tensorrt", row.torch_tensorrt, torch_tensorrt),
        ("TensorRT", row.tensorrt, tensorrt),
    ):
        if found is not None and short_version(found) != wanted:
            wrong.append(f"torch {torch} goes with {name} {wanted}, and {name} {found} is here")
    if cuda is not None and cuda.partition(".")[0] != row.cuda:
        wrong.append(
            f"torch_tensorrt {row.torch_tensorrt} is built for CUDA {row.cuda}, and torch {torch}"
            f" here for CUDA {cuda}"
        )
    return wrong


def import_torch_tensorrt(
    why: str, *, torch: str, tensorrt: str | None, cuda: str | None = None
) -> Any:
    """The module torch_tensorrt, where it goes with the torch and the TensorRT that are here; `why`
    is what needs it: "--target-option route=torch".

    Raises:
        MissingError: it is not installed, does not load, was made for other versions, or lacks
            names.
    """
    # Before it is imported: a wrong version ends in an undefined symbol.
    for version in installed("torch_tensorrt").values():
        _require_pair(why, check_pair(torch, version, tensorrt, cuda=cuda))
    found = import_library(
        "torch_tensorrt", why, "It wants a GPU and TensorRT's libraries; see `enginecast doctor`."
    )
    _require_pair(why, check_pair(torch, found.__version__, tensorrt, cuda=cuda))
    lacking = lacking_names(found.__version__)
    if lacking:
        raise MissingError(
            f"{why}: torch_tensorrt {found.__version__} lacks {', '.join(lacking[:5])}",
            hint="Use --target-option route=onnx.",
        )
    return found


def lacking_names(version: str) -> list[str]:
    """What the torch_tensorrt that is imported lacks of the names that are called of this version,
    as "torch_tensorrt.dynamo.conversion.DYNAMO_CONVERTERS".
    """
    found = []
    for module, names in called_names(version).items():
        try:
            owner = import_module(module)
        except ImportError:
            found.append(module)
            continue
        found += [f"{module}.{name}" for name in names if not hasattr(owner, name)]
    return found


def _require_pair(why: str, wrong: list[str]) -> None:
    if wrong:
        known = "; ".join(str(pair) for pair in known_pairs())
        raise MissingError(
            f"{why}: {'; '.join(wrong)}",
            hint=f"These go together: {known}; or --target-option route=onnx.",
        )
