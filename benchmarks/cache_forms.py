"""Attention that reads a growing cache, in forms of ONNX Runtime on a CPU, in turns.

    python benchmarks/cache_forms.py [--only kernels,llama,gpt2] [--rounds N] [--out FILE.json]

`kernels`: one layer's attention with past keys and values, of the shapes of Llama, Qwen2 and GPT-2:
a token after a past, and prompts; speed over a Concat and Attention (opset 23), and the error
against fp64 over that of eager.  The others: steps of two layers of a decoder as `--task
text-generation` makes it, with and without append-cache.  One thread, CPU time; the result, with
versions, machine and commit, goes to benchmarks/results/cache-forms.json.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
import torch
from cpu_forms import speeds
from large import RESULTS, machine
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor
from torch.export import Dim
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import enginecast
from enginecast.compiler.request import ModelOptions
from enginecast.exporters.onnx import lower
from enginecast.exporters.target import LoweringRequest
from enginecast.passes.ir.base import PassContext
from enginecast.runtime.device.machine import processor
from enginecast.testing import run_on, trace

Feeds = dict[str, Any]
SHAPES = {"llama 32/8": (32, 8, 64), "qwen2 14/2": (14, 2, 64), "gpt2 12/12": (12, 12, 64)}
"""Heads, heads of keys, size of a head."""
CALLS = {
    "1 after 512": (1, 1, 512),
    "1 after 2048": (1, 1, 2048),
    "4 x 1 after 512": (4, 1, 512),
    "8 after 512": (1, 8, 512),
    "128": (1, 128, 0),
    "512": (1, 512, 0),
}
"""Rows, tokens, tokens before."""
STEPS = {**CALLS, "4 x 1 after 2048": (4, 1, 2048)}
del STEPS["512"]
OPENINGS = 5
"""Of each session of whole steps."""
AGAIN = "Concat, Attention-23, again"
"""The same engine once more: what differs is noise."""
BEFORE, NOW = "Concat, Attention-23", "append-cache"
GROUPED, MULTI, PRODUCTS = "GroupQueryAttention", "MultiHeadAttention", "products, heads repeated"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="kernels,llama,gpt2", help="with commas between")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "cache-forms.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    result |= {"machine": machine(), "processor": processor(), "rounds": options.rounds}
    for name in options.only.split(","):
        result[name] = kernels(options.rounds) if name == "kernels" else steps(name, options.rounds)
        text = json.dumps(result, indent=1, sort_keys=True) + "\n"
        options.out.write_text(text, encoding="utf-8")


def kernels(rounds: int) -> dict[str, Any]:
    """Speeds and errors by dtype, shape and call."""
    found: dict[str, Any] = {}
    for precision, (name, shape) in ((p, s) for p in DTYPES for s in SHAPES.items()):
        forms = {
            BEFORE: _lowered(shape, DTYPES[precision], appends=False),
            NOW: _lowered(shape, DTYPES[precision], appends=True),
            **{form: _built(form, shape, precision) for form in (GROUPED, MULTI, PRODUCTS)},
        }
        for call, (rows, tokens, past) in CALLS.items():
            given = _inputs(shape, rows, tokens, past, DTYPES[precision])
            feeds = dict(zip("qkvabm", (x.numpy() for x in given), strict=True))
            exact = _attend(*(x.double() if x.is_floating_point() else x for x in given))
            lost = _error(_attend(*given), exact)
            repeats = max(1, 2**26 // (rows * tokens * (tokens + past) * shape[0] * shape[2]))
            calls = {form: _runs(session, feeds, repeats) for form, session in forms.items()}
            outputs = {form: torch.from_numpy(run()[0]) for form, run in calls.items()}
            row = speeds(calls, rounds, repeats=repeats)
            for form, output in outputs.items():
                row[form]["error"] = round(_error(output, exact) / lost, 2)
            row["eager's error"] = float(f"{lost:.2g}")
            found[f"{precision} {name} {call}"] = row
            print(precision, name, call, json.dumps(row), flush=True)
    return found


def _inputs(
    shape: tuple[int, int, int], rows: int, tokens: int, past: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Query, keys, values, both pasts, and a mask of bools; the first column has outliers."""
    heads, kv_heads, size = shape
    draw = torch.Generator().manual_seed(0)
    sizes = [(heads, tokens), *[(kv_heads, tokens)] * 2, *[(kv_heads, past)] * 2]
    found = [torch.randn(rows, *each, size, generator=draw) for each in sizes]
    for tensor in found:
        tensor[..., 0] *= 8
    seen = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    mask = seen.repeat(rows, 1, 1, 1)
    for row in range(rows):
        mask[row, ..., : 3 * row] = False
    return (*(x.to(dtype) for x in found), mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    keys, values = torch.cat([a, k], 2), torch.cat([b, v], 2)
    found = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=m, enable_gqa=q.shape[1] != k.shape[1]
    )
    return found.transpose(1, 2).flatten(2)


class _Layer(torch.nn.Module):
    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, size = self.shape
        torch._check(a.shape[2] == b.shape[2])
        torch._check(m.shape[3] == a.shape[2] + k.shape[2])
        keys, values = torch.cat([a, k], 2), torch.cat([b, v], 2)
        attention = torch.ops.enginecast.attention
        found = attention(q, keys, values, m, heads, kv_heads, size**-0.5, False)
        return found.transpose(1, 2).flatten(2), keys, values


def _lowered(shape: tuple[int, int, int], dtype: torch.dtype, *, appends: bool) -> Any:
    """What engines hold, with or without the pass."""
    rows, tokens, past = Dim("rows", min=1), Dim("tokens", min=1), Dim("past", min=0)
    new, before = {0: rows, 2: tokens}, {0: rows, 2: past}
    dynamic = (new, new, new, before, before, {0: rows, 2: tokens, 3: Dim.AUTO})
    program = trace(_Layer(shape), *_inputs(shape, 3, 5, 7, dtype), dynamic=dynamic)
    spec = lower.lowering("onnxruntime-cpu")
    ready, _ = run_on(
        program, spec if appends else spec.replace("append-cache,", ""), PassContext()
    )
    with tempfile.TemporaryDirectory() as folder:
        request = LoweringRequest(ready, Path(folder), ("y", "keys", "values"), {})
        lower.lower_to_onnx(request)
        return _session((Path(folder) / lower.GRAPH_FILE).read_bytes())


class _Nodes(list[NodeProto]):
    """Nodes of a graph, in order, and its constants."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[str, Any] = {}

    def add(self, op: str, inputs: str, outputs: str, **attributes: Any) -> str:
        domain = "com.microsoft" if op in (GROUPED, MULTI) else ""
        given = ["" if name == "-" else name for name in inputs.split()]
        self.append(helper.make_node(op, given, outputs.split(), domain=domain, **attributes))
        return outputs


def _built(form: str, shape: tuple[int, int, int], precision: str) -> Any:
    """A form that engines do not have."""
    heads, kv_heads, size = shape
    dtype = np.dtype(np.float32 if precision == "fp32" else np.float16)
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    nodes = _Nodes()
    nodes.constants |= {
        "zero": np.zeros((), dtype),
        "hidden": np.full((), -np.inf, dtype),
        "scale": np.full((), size**-0.5, dtype),
        "flat": np.array([0, 0, -1]),
    }
    nodes.add("Where", "m zero hidden", "bias")
    if form == GROUPED:
        _group_query(nodes, heads, kv_heads, size)
    else:
        nodes.add("Concat", "a k", "keys", axis=2)
        nodes.add("Concat", "b v", "values", axis=2)
        keys, values = (_repeated(nodes, n, shape) for n in ("keys", "values"))
        if form == MULTI:
            query = _flat(nodes, "q")
            attributes = {"num_heads": heads, "scale": size**-0.5}
            nodes.add(MULTI, f"{query} {keys} {values} - - bias", "y", **attributes)
        else:
            nodes.add("Mul", "q scale", "scaled")
            nodes.add("Transpose", keys, "turned", perm=[0, 1, 3, 2])
            nodes.add("MatMul", "scaled turned", "scores")
            nodes.add("Add", "scores bias", "masked")
            nodes.add("Softmax", "masked", "weights", axis=-1)
            nodes.add("MatMul", f"weights {values}", "mixed")
            nodes.add("Identity", _flat(nodes, "mixed"), "y")
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "a": kv_heads, "b": kv_heads}
    inputs = [
        helper.make_tensor_value_info(name, kind, ["rows", n, "p" if name in "ab" else "t", size])
        for name, n in sizes.items()
    ]
    inputs.append(helper.make_tensor_value_info("m", TensorProto.BOOL, ["rows", 1, "t", "all"]))
    outputs = [helper.make_tensor_value_info(n, kind, None) for n in ("y", "keys", "values")]
    read = {name for node in nodes for name in node.input}
    weights = [numpy_helper.from_array(v, n) for n, v in nodes.constants.items() if n in read]
    graph = helper.make_graph(nodes, "forms", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=onnx.IR_VERSION_2023_5_5)
    return _session(model.SerializeToString())


def _flat(nodes: _Nodes, source: str) -> str:
    nodes.add("Transpose", source, f"{source}_turned", perm=[0, 2, 1, 3])
    return nodes.add("Reshape", f"{source}_turned flat", f"{source}_flat")


def _repeated(nodes: _Nodes, name: str, shape: tuple[int, int, int]) -> str:
    heads, kv_heads, size = shape
    if heads == kv_heads:
        return name
    nodes.constants |= {
        "two": np.array([2]),
        "times": np.array([1, 1, heads // kv_heads, 1, 1]),
        "heads": np.array([0, heads, -1, size]),
    }
    nodes.add("Unsqueeze", f"{name} two", f"{name}_5")
    nodes.add("Expand", f"{name}_5 times", f"{name}_all")
    return nodes.add("Reshape", f"{name}_all heads", f"{name}_repeated")


def _group_query(nodes: _Nodes, heads: int, kv_heads: int, size: int) -> None:
    """The contrib op, which knows causal masks alone: ours goes in as attention_bias."""
    nodes.constants |= {"one": np.array([1], np.int32), "first": np.array([0])}
    nodes.add("Shape", "m", "rows", start=0, end=1)
    nodes.add("Shape", "m", "all", start=3, end=4)
    nodes.add("Cast", "all", "total", to=TensorProto.INT32)
    nodes.add("Sub", "total one", "last")
    nodes.add("Expand", "last rows", "lasts")
    nodes.add("Squeeze", "total first", "length")
    query, key, new = (_flat(nodes, name) for name in "qkv")
    nodes.add(
        GROUPED,
        f"{query} {key} {new} a b lasts length - - - bias",
        "y keys values",
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=size**-0.5,
    )


def _session(model: bytes | str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _runs(session: Any, feeds: Feeds, repeats: int) -> Callable[[], Any]:
    names = [given.name for given in session.get_inputs()]
    given = dict(zip(names, feeds.values(), strict=True))

    def run() -> Any:
        for _ in range(repeats):
            found = session.run(None, given)
        return found

    return run


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def steps(name: str, rounds: int) -> dict[str, Any]:
    """Speeds of whole steps of a model over those of an engine without the pass, by call."""
    small = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = {
        "llama": lambda: LlamaConfig(**small, **wide, **heads),
        "gpt2": lambda: GPT2Config(**small, n_positions=4096),
    }[name]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for form, table in ((BEFORE, {}), (NOW, lower._AFTERWARDS)):
            place = Path(folder) / form.split(",")[0]
            with patch.object(lower, "_AFTERWARDS", table):
                enginecast.compile(model, place, options=ModelOptions(task="text-generation"))
            files[form] = str(place / lower.GRAPH_FILE)
        return _opened({**files, AGAIN: files[BEFORE]}, rounds)


def _opened(files: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """Speeds by call: medians over sessions that are opened again and again, for where the memory
    of a session lies is worth more than what is measured.
    """
    spent: dict[str, list[dict[str, Any]]] = {call: [] for call in STEPS}
    for turn in range(OPENINGS):
        order = list(files)[turn % len(files) :] + list(files)[: turn % len(files)]
        sessions = {form: _session(files[form]) for form in order}
        for call, (rows, tokens, past) in STEPS.items():
            feeds = _step(sessions[NOW], rows, tokens, past)
            repeats = max(1, 8 // (rows * tokens))
            calls = {form: _runs(sessions[form], feeds, repeats) for form in files}
            one, two, _ = (run()[0] for run in calls.values())
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)
            spent[call].append(speeds(calls, max(3, rounds // OPENINGS), repeats=repeats))
    found: dict[str, Any] = {}
    for call, rows_ in spent.items():
        found[call] = {
            form: {
                "speed": round(median(row[form]["speed"] for row in rows_), 3),
                "speeds": [row[form]["speed"] for row in rows_],
                "cpu_ms": round(median(row[form]["cpu_ms"] for row in rows_), 3),
            }
            for form in files
        }
        print(call, json.dumps(found[call]), flush=True)
    return found


def _step(session: Any, rows: int, tokens: int, past: int) -> Feeds:
    draw = np.random.default_rng(0)
    feeds: Feeds = {}
    for given in session.get_inputs():
        if given.name == "input_ids":
            feeds[given.name] = draw.integers(0, 1000, (rows, tokens))
        elif given.name == "attention_mask":
            feeds[given.name] = np.ones((rows, past + tokens), np.int64)
        elif given.name == "position_ids":
            feeds[given.name] = np.tile(np.arange(past, past + tokens), (rows, 1))
        else:
            size = (rows, given.shape[1], past, given.shape[3])
            feeds[given.name] = draw.standard_normal(size, dtype=np.float32)
    return feeds


if __name__ == "__main__":
    main()
