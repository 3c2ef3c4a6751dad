"""Forms of one computation in ONNX Runtime on a CPU, in turns, as ratios in CPU time.

    python benchmarks/cpu_forms.py [--only rows,attention,floor] [--rounds N] [--out FILE.json]

`rows`: a product whose rows lie so many columns apart, without and with 16 columns of zeros.
`attention`: T5's, with a bias by distance and a mask of keys, four layers of base.  `floor`: ViT-B
on 512 x 512 pixels in eager, and its bare products.  One thread; the result, with versions, machine
and commit, goes to benchmarks/results/cpu-forms.json.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from large import RESULTS, machine
from onnx import NodeProto, TensorProto, helper, numpy_helper
from transformers import ViTConfig, ViTModel

from enginecast.runtime.device.machine import processor

Arrays = Mapping[str, Any]
ROWS = (16, 128, 512, 1025)
COLUMNS = ((768, 768), (1024, 1024), (1536, 384), (2048, 768), (3072, 768), (4096, 1024))
HEADS, SIZE, LAYERS = 12, 64, 4
FORMS = (
    "Attention-23, summed bias",
    "MultiHeadAttention, summed bias",
    "MultiHeadAttention, key padding mask",
    "products, summed bias",
    "products, mask added apart",
    "products, mask as a row of keys",
    "split by heads",
    "tiles of 64 queries",
    "tiles of 128 queries",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="rows,attention,floor", help="with commas between")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-forms.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "processor": processor()}
    result["rounds"] = options.rounds
    for name in options.only.split(","):
        result[name] = {"rows": rows, "attention": attention, "floor": floor}[name](options.rounds)
        print(json.dumps(result[name], indent=1), flush=True)
        text = json.dumps(result, indent=1, sort_keys=True) + "\n"
        options.out.write_text(text, encoding="utf-8")


def rows(rounds: int) -> dict[str, Any]:
    """Ratios to the product as it is, by rows and columns."""
    found: dict[str, Any] = {}
    for count in ROWS:
        for width, out in COLUMNS:
            draw = np.random.default_rng(0)
            x = draw.standard_normal((1, count, width), dtype=np.float32)
            weight = draw.standard_normal((width, out), dtype=np.float32)
            wide = np.concatenate([weight, np.zeros((16, out), np.float32)])
            pads = {"pads": np.array([0, 16]), "axis": np.array([-1])}
            pad = helper.make_node("Pad", ["x", "pads", "", "axis"], ["wide"])
            repeats = max(1, int(3e8 / (count * width * out)))
            found[f"{count} x {width} x {out}"] = speeds(
                {
                    "as it is": _session([_matmul("x")], {"w": weight}, {"x": x}, repeats),
                    "16 columns more": _session(
                        [_matmul("x")],
                        {"w": wide},
                        {"x": np.pad(x, [(0, 0), (0, 0), (0, 16)])},
                        repeats,
                    ),
                    "padded": _session(
                        [pad, _matmul("wide")], {"w": wide, **pads}, {"x": x}, repeats
                    ),
                },
                rounds,
                work=2e-9 * repeats * count * width * out,
            )
    return found


def _matmul(source: str) -> NodeProto:
    return helper.make_node("MatMul", [source, "w"], ["y"])


def attention(rounds: int) -> dict[str, Any]:
    """Ratios to Attention of opset 23, by tokens."""
    found: dict[str, Any] = {}
    for tokens in (128, 512, 1024):
        draw = np.random.default_rng(0)
        shape = (1, tokens, HEADS * SIZE)
        feeds: dict[str, Any] = {
            name: draw.standard_normal(shape, dtype=np.float32) * np.float32(0.5) for name in "qkv"
        }
        feeds["mask"] = (np.arange(tokens) < tokens * 0.8)[None].astype(np.int64)
        calls = {}
        wanted = None
        for form in FORMS:
            nodes, constants = _attention(form, tokens)
            calls[form] = _session(nodes, constants, feeds, max(1, 768 // tokens))
            output = calls[form]()
            wanted = output if wanted is None else wanted
            np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5, err_msg=form)
        found[str(tokens)] = speeds(calls, rounds)
    return found


def floor(rounds: int) -> dict[str, Any]:
    """Products alone: linears with staggered rows, scores and values of whole heads.

    Each reads the same input: what a layer computes besides is not there.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = ViTConfig(image_size=512)
    model = ViTModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    image = torch.randn(1, 3, 512, 512)
    tokens, width, hidden = 1025, config.hidden_size, config.intermediate_size
    draw = np.random.default_rng(0)
    feeds = {
        "x": draw.standard_normal((1, tokens, width), dtype=np.float32),
        "wide": draw.standard_normal((1, tokens, hidden + 16), dtype=np.float32),
        "heads": draw.standard_normal((1, HEADS * tokens, SIZE), dtype=np.float32),
        "scores": draw.standard_normal((1, HEADS * tokens, tokens), dtype=np.float32),
    }
    constants: dict[str, Any] = {
        "h": np.array([HEADS, tokens, SIZE]),
        "s": np.array([HEADS, tokens, tokens]),
        "start": np.array([0, 0, 0]),
        "end": np.array([1, 1, 1]),
    }
    nodes = _Nodes()
    nodes.add("Reshape", "heads h", "q")
    nodes.add("Transpose", "q", "k", perm=[0, 2, 1])
    nodes.add("Reshape", "scores s", "p")
    ends = []
    for layer in range(config.num_hidden_layers):
        sizes = [("x", width, width)] * 4 + [("x", width, hidden), ("wide", hidden + 16, width)]
        for i, (source, rows, columns) in enumerate(sizes):
            weight = f"w{layer}_{i}"
            constants[weight] = draw.standard_normal((rows, columns), dtype=np.float32)
            ends.append(nodes.add("MatMul", f"{source} {weight}", f"y{layer}_{i}"))
        ends.append(nodes.add("MatMul", "q k", f"scores{layer}"))
        ends.append(nodes.add("MatMul", "p q", f"mixed{layer}"))
    # One element of each, so that none is dropped.
    read = [nodes.add("Slice", f"{end} start end", f"one{i}") for i, end in enumerate(ends)]
    nodes.add("Concat", " ".join(read), "y", axis=0)
    bare = _session(nodes, constants, feeds, 1)

    def eager() -> Any:
        with torch.no_grad():
            return model(image)[0]

    return speeds({"eager": eager, "bare products": bare}, rounds)


class _Nodes(list[NodeProto]):
    """Nodes of a graph, in order."""

    def add(self, op: str, inputs: str, outputs: str, **attributes: Any) -> str:
        domain = "com.microsoft" if op == "MultiHeadAttention" else ""
        given = ["" if name == "-" else name for name in inputs.split()]
        self.append(helper.make_node(op, given, outputs.split(), domain=domain, **attributes))
        return outputs


def _named(stem: str, count: int) -> str:
    return " ".join(f"{stem}{i}" for i in range(count))


def _attention(form: str, tokens: int) -> tuple[list[NodeProto], Arrays]:
    """The bias and the mask once, and then all layers."""
    tiles = tokens // int(form.split()[2]) if form.startswith("tiles") else 1
    places = np.arange(tokens)
    table = np.random.default_rng(1).standard_normal((HEADS, 2 * tokens - 1), dtype=np.float32)
    constants: dict[str, Any] = {
        "table": table,
        "distance": places[None] - places[:, None] + tokens - 1,
        "zero": np.float32(0),
        "low": np.float32(-1e9),
        "first": np.array([0]),
        "middle": np.array([1, 2]),
        "apart": np.array([0, 0, HEADS, SIZE]),
        "joined": np.array([0, 0, HEADS * SIZE]),
        "heads": np.array([SIZE] * HEADS),
        "each": np.array([1] * HEADS),
        "tiles": np.array([tokens // tiles] * tiles),
        "ones": np.ones((1, HEADS, tokens, 1), np.float32),
        "row": np.array([1, HEADS, 1, tokens]),
    }
    nodes = _Nodes()
    nodes.add("Gather", "table distance", "by_head", axis=1)
    nodes.add("Unsqueeze", "by_head first", "distances")
    nodes.add("Cast", "mask", "seen", to=TensorProto.BOOL)
    nodes.add("Where", "seen zero low", "hidden")
    nodes.add("Unsqueeze", "hidden middle", "keys")
    nodes.add("Cast", "mask", "padding", to=TensorProto.INT32)
    nodes.add("Add", "distances keys", "bias")
    nodes.add("Expand", "keys row", "key_row")
    if form == "split by heads":
        nodes.add("Split", "bias each", _named("bias", HEADS), axis=1)
        for i in range(HEADS):
            nodes.add("Squeeze", f"bias{i} first", f"head_bias{i}")
    if tiles > 1:
        nodes.add("Split", "bias tiles", _named("bias", tiles), axis=2)
    query = "q"
    for layer in range(LAYERS):
        if form in _FUSED:
            op, inputs, attributes = _FUSED[form]
            query = nodes.add(op, f"{query} k v {inputs}", f"out{layer}", scale=1.0, **attributes)
        elif form == "split by heads":
            query = _by_heads(nodes, query, layer)
        else:
            query = _products(nodes, form, query, layer, tiles)
    nodes.add("Identity", query, "y")
    return nodes, constants


_FUSED: Mapping[str, tuple[str, str, dict[str, int]]] = {
    FORMS[0]: ("Attention", "bias", {"q_num_heads": HEADS, "kv_num_heads": HEADS}),
    FORMS[1]: ("MultiHeadAttention", "- - bias", {"num_heads": HEADS}),
    FORMS[2]: ("MultiHeadAttention", "- padding distances", {"num_heads": HEADS}),
}
"""The op of a form, what it reads besides query, key and value, and its attributes."""


def _by_heads(nodes: _Nodes, query: str, n: int) -> str:
    nodes.add("Split", f"{query} heads", _named(f"q{n}_", HEADS), axis=2)
    nodes.add("Transpose", "k", f"kt{n}", perm=[0, 2, 1])
    nodes.add("Split", f"kt{n} heads", _named(f"k{n}_", HEADS), axis=1)
    nodes.add("Split", "v heads", _named(f"v{n}_", HEADS), axis=2)
    for i in range(HEADS):
        nodes.add("MatMul", f"q{n}_{i} k{n}_{i}", f"s{n}_{i}")
        nodes.add("Add", f"s{n}_{i} head_bias{i}", f"b{n}_{i}")
        nodes.add("Softmax", f"b{n}_{i}", f"p{n}_{i}", axis=-1)
        nodes.add("MatMul", f"p{n}_{i} v{n}_{i}", f"m{n}_{i}")
    return nodes.add("Concat", _named(f"m{n}_", HEADS), f"out{n}", axis=2)


def _products(nodes: _Nodes, form: str, query: str, n: int, tiles: int) -> str:
    for name, source in (("q", query), ("k", "k"), ("v", "v")):
        nodes.add("Reshape", f"{source} apart", f"{name}r{n}")
        order = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        nodes.add("Transpose", f"{name}r{n}", f"{name}h{n}", perm=order)
    key, parts = f"kh{n}", [(f"qh{n}", "bias")]
    if form == "products, mask as a row of keys":
        parts = [(nodes.add("Concat", f"qh{n} ones", f"qw{n}", axis=3), "distances")]
        key = nodes.add("Concat", f"kh{n} key_row", f"kw{n}", axis=2)
    elif tiles > 1:
        split = nodes.add("Split", f"qh{n} tiles", _named(f"qt{n}_", tiles), axis=2)
        parts = [(part, f"bias{i}") for i, part in enumerate(split.split())]
    for i, (part, bias) in enumerate(parts):
        found = nodes.add("MatMul", f"{part} {key}", f"s{n}_{i}")
        if form == "products, mask added apart":
            found, bias = nodes.add("Add", f"{found} distances", f"d{n}_{i}"), "keys"
        nodes.add("Add", f"{found} {bias}", f"b{n}_{i}")
        nodes.add("Softmax", f"b{n}_{i}", f"p{n}_{i}", axis=-1)
        nodes.add("MatMul", f"p{n}_{i} vh{n}", f"m{n}_{i}")
    nodes.add("Concat", _named(f"m{n}_", len(parts)), f"c{n}", axis=2)
    nodes.add("Transpose", f"c{n}", f"t{n}", perm=[0, 2, 1, 3])
    return nodes.add("Reshape", f"t{n} joined", f"out{n}")


def _session(
    nodes: list[NodeProto],
    constants: Arrays,
    feeds: Arrays,
    repeats: int,
) -> Callable[[], Any]:
    """A call that runs a graph so many times, and gives its output."""
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(feed.dtype), ["batch", "rows", *feed.shape[2:]]
        )
        if feed.ndim == 3
        else helper.make_tensor_value_info(name, TensorProto.INT64, feed.shape)
        for name, feed in feeds.items()
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "forms", inputs, [output], weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=onnx.IR_VERSION_2023_5_5)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def call() -> Any:
        for _ in range(repeats):
            found = session.run(None, dict(feeds))[0]
        return found

    return call


def speeds(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    repeats: int = 1,
    work: float | None = None,
) -> dict[str, Any]:
    """Medians of the ratios to the first, round by round, in an order that turns around.

    Args:
        repeats: how often a call does what is timed.
        work: GFLOP of one call.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            start = time.process_time()
            calls[name]()
            spent[name].append(time.process_time() - start)
    spent = {name: found[2:] for name, found in spent.items()}
    first = spent[next(iter(calls))]
    return {
        name: {
            "speed": round(median(a / b for a, b in zip(first, found, strict=True)), 3),
            "cpu_ms": round(1e3 * median(found) / repeats, 3),
            **({} if work is None else {"gflops": round(work / median(found), 1)}),
        }
        for name, found in spent.items()
    }


if __name__ == "__main__":
    main()
