"""One thing changed in a published engine; the digests are made to fit it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from exports import reseal
from onnx import helper
from safetensors import safe_open

from enginecast.compiler.verify.bundle import verify_bundle

Edit = Callable[[Path], object]
GRAPH, WEIGHTS = "engine.onnx", "weights.safetensors"
NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "SkipLayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "GroupNormalization",
    "InstanceNormalization",
)
TABLES = ("embed_tokens.weight", "word_embeddings.weight")
"""A verification reads only rows of the tokens that it draws."""


def outcome(bundle: Path, folder: Path, edit: Edit) -> str:
    """The verdict over a copy of the bundle that `edit` has changed."""
    copy = folder / "mutated"
    shutil.copytree(bundle, copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    edit(copy)
    reseal(copy)
    changed = {path.name for path in copy.iterdir() if before.get(path.name) != path.read_bytes()}
    assert len(changed - {"manifest.json"}) <= 1
    return verify_bundle(copy).verdict.outcome


def nothing(bundle: Path) -> None:
    """Leaves the bundle as it is."""


def edit_graph(bundle: Path, edit: Callable[[onnx.GraphProto], object]) -> None:
    model = onnx.load(bundle / GRAPH, load_external_data=False)
    edit(model.graph)
    onnx.save(model, bundle / GRAPH)


def drop_mask(name: str) -> Edit:
    """The graph sees a mask of ones, whatever it is given."""

    def edit(graph: onnx.GraphProto) -> None:
        (declared,) = [value for value in graph.input if value.name == name]
        ones = "mutated.ones"
        for node in graph.node:
            node.input[:] = [ones if source == name else source for source in node.input]
        made = [
            helper.make_node("Equal", [name, name], ["mutated.equal"]),
            helper.make_node(
                "Cast", ["mutated.equal"], [ones], to=declared.type.tensor_type.elem_type
            ),
        ]
        nodes = [*made, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    return lambda bundle: edit_graph(bundle, edit)


def change_epsilon(index: int, value: float) -> Edit:
    """One norm adds another epsilon."""

    def edit(graph: onnx.GraphProto) -> None:
        norms = [node for node in graph.node if node.op_type in NORMS]
        (epsilon,) = [a for a in norms[index].attribute if a.name == "epsilon"]
        assert epsilon.f != np.float32(value)
        epsilon.f = value

    return lambda bundle: edit_graph(bundle, edit)


def perturb_weight(name: str, size: float, index: int | None = None) -> Edit:
    """One element, drawn if not given, grows by `size` times its tensor's root mean square."""

    def edit(bundle: Path) -> None:
        path = bundle / WEIGHTS
        with safe_open(path, framework="np") as file:
            array = file.get_tensor(name)
        place = np.random.default_rng(5).integers(array.size) if index is None else index
        changed = array.reshape(-1).copy()
        changed[place] += size * np.sqrt(np.mean(np.square(array.astype(np.float64))))
        data = path.read_bytes()
        assert array.tobytes() in data
        path.write_bytes(data.replace(array.tobytes(), changed.tobytes(), 1))

    return edit


def weights(bundle: Path) -> list[str]:
    with safe_open(bundle / WEIGHTS, framework="np") as file:
        names: list[str] = file.keys()
    return sorted(name for name in names if not name.endswith(TABLES))
