"""The layers that TensorRT built for a network, as its engine inspector reports them.

    {"Layers": [{"Name": ..., "LayerType": "gemm", "Inputs": [{"Format/Datatype": "FP8"}], ...,
                 "Metadata": "[ONNX Layer: node_linear]\\x1e[ONNX Layer: node_gelu]"}, ...]}

An engine that was built without detailed profiling gives a list of names instead.  The fields are
those of trtexec's --exportLayerInfo; which of them there are differs between layers and versions,
so what is not there is taken as not reported, and what is not known here is left alone.
Source: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/advanced.html
(engine inspector).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from enginecast.errors import BundleError

_DTYPES = {
    "float": "fp32",
    "fp32": "fp32",
    "half": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8e4m3": "fp8",
    "fp4": "fp4",
    "int4": "int4",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
}
"""Words of "Format/Datatype", such as "Row major linear FP16 format" or "Half"."""
_TYPE_FIELDS = ("Format/Datatype", "Datatype", "DataType")
_ORIGIN = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_SEPARATORS = re.compile(r"[\x1e\x1f]+")
_COPIES = frozenset({"reformat", "noop", "shuffle", "constant"})
KINDS = {
    "RMSNormalization": frozenset({"rms_norm", "skip_rms_norm", "rmsnormalization"}),
    "Attention": frozenset({"attention", "scaled_dot_product_attention"}),
    "MatMul": frozenset({"matmul", "linear", "gemm", "addmm", "mm", "bmm", "conv2d", "conv"}),
}
"""Kinds of nodes whose fate is reported, by what the exporter makes of an op's name."""


@dataclass(frozen=True)
class Layer:
    """One layer of an engine."""

    name: str
    kind: str = ""
    """As TensorRT calls it, such as "gemm"; empty: it was not reported."""
    inputs: tuple[str, ...] = ()
    """Dtypes: "fp16"; "unknown" for what is not known here."""
    outputs: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    """The nodes of the network that it computes."""


@dataclass(frozen=True)
class Kept:
    """How the nodes of one kind were compiled."""

    kind: str
    whole: tuple[str, ...]
    """Nodes that one layer computes."""
    split: tuple[str, ...]
    """Nodes that several layers share."""
    fp8: tuple[str, ...] = ()
    """Of both, those with a layer that reads fp8."""


@dataclass(frozen=True)
class Layers:
    """The layers of an engine, in the order in which they run."""

    layers: tuple[Layer, ...]
    detailed: bool
    """Whether the engine reports more than names."""

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def by_kind(self) -> dict[str, int]:
        return _counted(layer.kind for layer in self.layers if layer.kind)

    @property
    def output_dtypes(self) -> dict[str, int]:
        """How many outputs of layers there are of each dtype."""
        return _counted(dtype for layer in self.layers for dtype in layer.outputs)

    @property
    def fused(self) -> tuple[Layer, ...]:
        """Those that compute several nodes of the network."""
        return tuple(layer for layer in self.layers if len(layer.origins) > 1)

    def kept(self, kind: str) -> Kept:
        """Which nodes of a kind, a key of `KINDS`, one layer computes."""
        where: dict[str, list[Layer]] = {}
        for layer in self.layers:
            for node in layer.origins:
                # "rms_norm" of "node_rms_norm_3"
                op = re.sub(r"^node_|(_+\d+)+$", "", node).lower()
                if op in KINDS[kind] and layer.kind.lower() not in _COPIES:
                    where.setdefault(node, []).append(layer)
        return Kept(
            kind,
            tuple(node for node, layers in where.items() if len(layers) == 1),
            tuple(node for node, layers in where.items() if len(layers) > 1),
            tuple(node for node, layers in where.items() if any("fp8" in x.inputs for x in layers)),
        )

    def lines(self) -> tuple[str, ...]:
        """For a report: what the builder made, in a few lines."""
        if not self.detailed:
            return (f"{len(self)} layers; the engine reports no more than their names",)
        found = [
            f"{len(self)} layers: {_listed(self.by_kind)}",
            f"outputs of layers: {_listed(self.output_dtypes)}",
            f"layers that compute several nodes of the network: {len(self.fused)}",
        ]
        for kept in map(self.kept, KINDS):
            total = len(kept.whole) + len(kept.split)
            line = f"{kept.kind}: {len(kept.whole)} of {total} in one layer each"
            if kept.split:
                rest = f" and {len(kept.split) - 3} more" if len(kept.split) > 3 else ""
                line += f"; several layers for {', '.join(kept.split[:3])}{rest}"
            if kept.fp8:
                line += f"; {len(kept.fp8)} on fp8"
            found += [line] if total else []
        return tuple(found)


def parse_layers(text: str, name: str = "the engine inspector") -> Layers:
    """Read what `EngineInspector.get_engine_information` gives as JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BundleError(f"{name}: expected JSON about the layers, got {text[:60]!r}") from error
    layers = found.get("Layers") if isinstance(found, dict) else None
    if not isinstance(layers, list):
        raise BundleError(f"{name}: expected an object with a list of Layers, got {text[:60]!r}")
    detailed = any(isinstance(one, dict) for one in layers)
    return Layers(tuple(_layer(one) for one in layers), detailed)


def _layer(given: Any) -> Layer:
    if not isinstance(given, dict):
        return Layer(str(given))
    # The nodes of "[ONNX Layer: a]\\x1e[ONNX Layer: b]"; else its parts, as torch_tensorrt sets
    # them.
    metadata = str(given.get("Metadata", ""))
    origins = _ORIGIN.findall(metadata) or filter(None, _SEPARATORS.split(metadata))
    return Layer(
        str(given.get("Name", "")),
        str(given.get("LayerType", "")),
        _dtypes(given.get("Inputs")),
        _dtypes(given.get("Outputs")),
        tuple(dict.fromkeys(origins)),
    )


def _dtypes(tensors: Any) -> tuple[str, ...]:
    found = []
    for one in tensors if isinstance(tensors, list) else ():
        if isinstance(one, dict):
            text = next((str(one[name]) for name in _TYPE_FIELDS if name in one), "")
            words = re.findall(r"[a-z0-9]+", text.lower())
            found.append(next((_DTYPES[word] for word in words if word in _DTYPES), "unknown"))
    return tuple(found)


def _counted(items: Iterator[str]) -> dict[str, int]:
    """The most frequent first."""
    return dict(sorted(Counter(items).items(), key=lambda item: (-item[1], item[0])))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none reported"
