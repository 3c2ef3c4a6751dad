"""Where a node comes from: the module that created it and the line of the user's model code."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
# torch's own frames: as installed, as torch names its own insertions ("torch/fx/passes/..."), and
# generated code ("<eval_with_key>.12"), whose numbers change from run to run.
_NOT_USER_CODE = re.compile(r"(^|(site|dist)-packages[/\\])torch[/\\]|^<")
_ROOT = "_export_root."
LAYER = "enginecast_layer"
"""Metadata key for a fused node's own modules, in the form of `nn_module_stack`. That entry itself
names the modules of the last node that was fused in."""
_SYNTHETIC = "_empty_nn_module_stack_from_metadata_hook"


def module_path(node: Node) -> str:
    """Dotted path of the innermost module that made the node; "" for the root and for no module.

    Nodes that torch.export adds itself carry a module stack with a made-up name: no module.
    """
    return _innermost(node.meta.get("nn_module_stack") or {})


def layer_stack(node: Node) -> Mapping[str, tuple[str, Any]]:
    """Path and class of the modules around a layer's node, outermost first."""
    found: Mapping[str, tuple[str, Any]] | None = node.meta.get(LAYER)
    return found or node.meta.get("nn_module_stack") or {}


def layer_path(node: Node) -> str:
    """Like `module_path`, for the layer that a node computes."""
    return _innermost(layer_stack(node))


def _innermost(stack: Mapping[str, tuple[str, Any]]) -> str:
    return _path(list(stack.values())[-1][0]) if stack else ""


def module_paths(node: Node) -> frozenset[str]:
    """Dotted paths of all modules around the node, without module lists."""
    stack = node.meta.get("nn_module_stack") or {}
    return frozenset(_path(name) for name, _ in stack.values())


def module_calls(node: Node) -> tuple[str, ...]:
    """Paths of the module calls around the node, outermost first; "path@1" is the second call of a
    module.
    """
    stack = node.meta.get("nn_module_stack") or {}
    counts = (str(key).partition("@")[1:] for key in stack)
    paths = (_path(name) for name, _ in stack.values())
    return tuple(path + "".join(count) for path, count in zip(paths, counts, strict=True))


def _path(name: object) -> str:
    # Older captures name modules by the Python expression that reaches them.
    path = str(name).removeprefix("L['self']").removeprefix("L__self__").removeprefix(".")
    _, _, path = path.rpartition(".__self__")  # of a strict capture, through our own wrapper
    # Within a block, the paths begin at the module that torch.export wraps around the model.
    path = f"{path}.".removeprefix(".").removeprefix(_ROOT).removesuffix(".")
    return "" if path == _SYNTHETIC else path


def module_classes(node: Node) -> frozenset[str]:
    """Class names of all modules around a layer's node, e.g. {"T5Stack", "T5LayerFF"}."""
    stack = layer_stack(node)
    found = (kind if isinstance(kind, str) else kind.__qualname__ for _, kind in stack.values())
    return frozenset(name.rpartition(".")[2] for name in found)


def source_line(node: Node) -> str:
    """`modeling_t5.py:66`, the innermost frame outside torch itself; "" when there is none."""
    return line_of(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=1 << 14)  # equal blocks have equal traces
def line_of(stack_trace: str) -> str:
    """The same for a stack trace."""
    frames = [
        frame for frame in _FRAME.finditer(stack_trace) if not _NOT_USER_CODE.search(frame["file"])
    ]
    return f"{PurePath(frames[-1]['file']).name}:{frames[-1]['line']}" if frames else ""


def checked(text: str) -> str:
    """What an assertion checks, of the message that torch gives it."""
    return text.removeprefix("Runtime assertion failed for expression ").partition(" on node ")[0]


def call_place(node: Node) -> str:
    """An op and its origin, for messages: "aten.erf.default (module 'proj', vit.py:12)"."""
    return f"{node.target} (module '{module_path(node)}', {source_line(node) or 'no source line'})"
