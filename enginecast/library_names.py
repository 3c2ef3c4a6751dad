"""Names of torch and other libraries that one of their versions may lack.

An operator or a private name comes and goes with a library's versions.  Looked up here, one that is
missing costs what needs it, and not the import of a module that also does much else.
tests/project/test_library_names.py finds what is looked up elsewhere.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from enginecast.errors import MissingError

TESTED = {
    "torch": ">=2.11,<2.15",
    "transformers": ">=5.3,<5.25",
    "onnx": ">=1.21,<1.24",
    "onnxscript": ">=0.7,<0.8",
    "onnxruntime": ">=1.28,<1.33",
}
"""Versions that the tests ran with; README.md's table has them, too."""


@dataclass(frozen=True)
class MissingOperator:
    """Stands in a table for an operator that this torch lacks: no node of a program calls it."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise _missing(f"torch.ops.{self.name}", "this rewrite")


class _Overloads:
    """The overloads of one operator, as attributes."""

    def __init__(self, name: str, packet: Any) -> None:
        self._name, self._packet = name, packet

    def __getattr__(self, overload: str) -> Any:
        found = getattr(self._packet, overload, None)
        found = MissingOperator(f"{self._name}.{overload}") if found is None else found
        setattr(self, overload, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._packet(*args, **kwargs)


class Operators:
    """Operators of one of torch's namespaces, as `torch.ops` has them; any name can be asked for.

    `aten.cholesky.default` is torch's operator, or a `MissingOperator`.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        import torch

        packet = getattr(getattr(torch.ops, self._namespace), name, None)
        found = _Overloads(f"{self._namespace}.{name}", packet)
        setattr(self, name, found)
        return found


aten = Operators("aten")


def higher_order(name: str) -> Any:
    """One of torch's operators that run graphs, such as `cond`, or a `MissingOperator`."""
    import torch

    found = getattr(torch.ops.higher_order, name, None)
    return MissingOperator(f"higher_order.{name}") if found is None else found


def private(name: str, doing: str) -> Any:
    """What a library has under a private name, such as "torch.fx.proxy._STACK_TRACE_ANCHORS".

    Args:
        doing: what needs it, as the start of a sentence: "--target aotinductor".

    Raises:
        MissingError: this version of the library has no such name.
    """
    found = private_or_none(name)
    if found is None:
        raise _missing(name, doing)
    return found


def private_or_none(name: str) -> Any:
    """The same; None where this version has no such name."""
    module, _, attribute = name.rpartition(".")
    with suppress(ImportError, AttributeError):
        return getattr(import_module(module), attribute)
    with suppress(ImportError):
        return import_module(name)
    return None


def untested() -> list[str]:
    """A sentence for each library here whose version was not tested."""
    found = []
    for library, wanted in TESTED.items():
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(library)
            here, least, beyond = (
                tuple(map(int, re.findall(r"\d+", text)[:2]))
                for text in (version, *wanted.split(","))
            )
            if not least <= here < beyond:
                found.append(f"{library} {version} was not tested. {tested(library)}")
    return found


def _missing(name: str, doing: str) -> MissingError:
    library = name.partition(".")[0]
    version = metadata.version(library)
    return MissingError(
        f"{doing} needs {name}, which {library} {version} does not have",
        hint=tested(library),
    )


def tested(library: str) -> str:
    """How to come to a version that was tested, as a hint."""
    return f"Install a version that was tested: pip install '{library}{TESTED[library]}'."
