"""Engines on a CPU side by side with peers, each of which has an environment of its own.

    python benchmarks/peers.py [--only NAME,...] [--engines NAME,...] [--rounds N] [--envs DIR]
        [--out FILE.json]

One thread each, CPU time, rounds in turns across processes, ratios to eager in the same run; the
cosine is the lowest of a row beside eager.  Models have real shapes and seeded random weights:
times are those of trained models, errors are not.  A peer that does not install or run is absent,
with its reason.  Rows that were not asked for stay in the file as they are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from large import RESULTS, machine
from onnxruntime.quantization import QuantType, quantize_dynamic
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    SegformerConfig,
    SegformerModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import enginecast
from enginecast.errors import EnginecastError
from enginecast.runtime.device.machine import processor
from enginecast.runtime.sessions.onnxruntime import create_session
from enginecast.runtime.sessions.settings import Settings
from enginecast.verify.metrics import measure, row_mask

HERE = Path(__file__).parent
PEERS = ("openvino",)
ENGINES: Mapping[str, Mapping[str, str]] = {
    "fp32": {},
    "int8": {"precision": "int8"},
    "openvino": {"target": "openvino"},
    "openvino of one size": {"target": "openvino"},
    "openvino bf16": {"target": "openvino", "precision": "bf16"},
    "aotinductor bf16": {"target": "aotinductor", "precision": "bf16"},
}
"""Ours, by what `enginecast.compile` gets."""
SETTINGS = {"openvino of one size": Settings(threads=1, fixed_sizes=True)}
"""With which one is loaded that is not loaded as it is by default."""
Sample = Callable[[], float]
"""Runs once; gives the CPU seconds of it."""


@dataclass(frozen=True)
class Case:
    """A model at one size."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, Tensor]
    output: str
    int8: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of cases, with commas between")
    parser.add_argument("--engines", default=",".join(ENGINES), help="ours, with commas between")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--envs", type=Path, default=HERE.parent / "build" / "peers")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = [name for name in options.only.split(",") if name]
    known = cases()
    unknown = set(asked) - set(known)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    result: dict[str, Any] = {"rows": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    envs = {name: environment(options.envs, name) for name in PEERS}
    for name in asked or known:
        with tempfile.TemporaryDirectory(prefix="enginecast-peers-") as folder:
            engines = options.engines.split(",")
            row = measure_case(known[name](), Path(folder), envs, options.rounds, engines)
        result["rows"][name] = row | {"rounds": options.rounds, "processor": processor()}
        result["machine"] = machine()
        options.out.write_text(
            json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
        print(name, json.dumps(result["rows"][name], indent=1), flush=True)


def cases() -> dict[str, Callable[[], Case]]:
    """By name; models are made when they are asked for."""
    return {
        "t5-base 1x128": lambda: _t5([128], 128, int8=True),
        "t5-base 1x512 with 400 valid": lambda: _t5([400], 512, int8=True),
        "t5-base 4 layers 1x128": lambda: _t5([128], 128, int8=True, layers=4),
        "t5-base 4 layers 1x512": lambda: _t5([512], 512, int8=True, layers=4),
        "t5-base 8 ragged of 512": lambda: _t5([9, 14, 21, 30, 12, 45, 60, 25], 512, int8=True),
        "minilm 32x64": lambda: _minilm(32, 64),
        "vit-b 512": _vit,
        "segformer-b0 512": _segformer,
    }


def _t5(lengths: list[int], tokens: int, *, int8: bool, layers: int = 12) -> Case:
    config = T5Config(
        d_model=768,
        d_ff=2048,
        num_layers=layers,
        num_heads=12,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    )
    return Case(
        lambda: T5EncoderModel(config), _text(lengths, tokens, 32128), "last_hidden_state", int8
    )


def _minilm(batch: int, tokens: int) -> Case:
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    given = _text([tokens] * batch, tokens, config.vocab_size)
    return Case(
        lambda: BertModel(config, add_pooling_layer=False), given, "last_hidden_state", True
    )


def _vit() -> Case:
    config = ViTConfig(image_size=512)
    image = torch.randn(1, 3, 512, 512, generator=torch.Generator().manual_seed(1))
    given = {"pixel_values": image}
    return Case(lambda: ViTModel(config, add_pooling_layer=False), given, "last_hidden_state")


def _segformer() -> Case:
    image = torch.randn(1, 3, 512, 512, generator=torch.Generator().manual_seed(1))
    given = {"pixel_values": image}
    return Case(lambda: SegformerModel(SegformerConfig()), given, "last_hidden_state")


def _text(lengths: list[int], tokens: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.randint(
        5, vocabulary, (len(lengths), tokens), generator=torch.Generator().manual_seed(1)
    )
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def measure_case(
    case: Case,
    folder: Path,
    envs: Mapping[str, Path | str],
    rounds: int,
    engines: Sequence[str],
) -> dict[str, Any]:
    """Time all that runs a case in turns."""
    torch.manual_seed(0)
    model = case.make().eval().requires_grad_(False)
    feeds = {name: tensor.numpy() for name, tensor in case.inputs.items()}
    samples: dict[str, Sample] = {}
    outputs: dict[str, Any] = {}
    absent: dict[str, str] = {}
    versions: dict[str, str] = {}

    def add(name: str, call: Callable[[], Any]) -> None:
        outputs[name] = np.asarray(call()).astype(np.float32)
        samples[name] = lambda: _cpu(call)

    def eager() -> Any:
        with torch.no_grad():
            return model(**case.inputs)[case.output]

    add("eager", eager)
    plain = folder / "plain.onnx"
    with torch.no_grad():
        torch.onnx.export(model, (), plain, kwargs=dict(case.inputs), dynamo=True, verbose=False)
    session = create_session(plain, ["CPUExecutionProvider"], 1)
    add("torch.onnx", lambda: session.run(None, feeds)[0])
    if case.int8 and "int8" in engines:
        path = folder / "dynamic.onnx"
        products = ["MatMul", "Gather"]  # of Attention it makes a broken node
        quantize_dynamic(
            plain,
            path,
            per_channel=True,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=products,
            use_external_data_format=True,
        )
        dynamic = create_session(path, ["CPUExecutionProvider"], 1)
        add("quantize_dynamic int8", lambda: dynamic.run(None, feeds)[0])
    for kind in engines:
        if kind == "int8" and not case.int8:
            continue
        bundle = folder / kind.replace(" ", "-")
        try:
            enginecast.compile(model, bundle, example=dict(case.inputs), threads=1, **ENGINES[kind])  # type: ignore[arg-type]
        except EnginecastError as error:
            absent[f"enginecast {kind}"] = error.message
            continue
        tuned = SETTINGS.get(kind, False)
        engine = enginecast.load(bundle, threads=1, allow_code=True, tuned=tuned)
        add(f"enginecast {kind}", lambda engine=engine: engine.run(feeds)[case.output])  # type: ignore[misc]
    save_file(feeds, folder / "inputs.safetensors")
    workers = []
    for name, python in envs.items():
        try:
            worker = Worker(name, python, plain, folder)
        except RuntimeError as error:
            absent[name] = str(error)
            continue
        workers.append(worker)
        versions[name], outputs[name], samples[name] = worker.version, worker.output, worker.sample
    try:
        spent = in_turns(samples, rounds)
    finally:
        for worker in workers:
            worker.close()
    mask = feeds.get("attention_mask")
    ratios = {n: [a / b for a, b in zip(spent["eager"], s, strict=True)] for n, s in spent.items()}
    valid = row_mask(outputs["eager"].shape, mask)
    return {
        "speed": {name: round(median(found), 3) for name, found in ratios.items()},
        "cpu_ms": {name: round(1e3 * median(found), 2) for name, found in spent.items()},
        "cosine": {
            name: round(measure(found, outputs["eager"], valid).cosine, 6)
            for name, found in outputs.items()
        },
        "absent": absent,
        "versions": versions,
    }


def _cpu(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def in_turns(samples: Mapping[str, Sample], rounds: int) -> dict[str, list[float]]:
    """One sample of each a round, in an order that turns around; the first two rounds warm up."""
    spent: dict[str, list[float]] = {name: [] for name in samples}
    for turn in range(rounds + 2):
        for name in list(samples)[:: -1 if turn % 2 else 1]:
            spent[name].append(samples[name]())
    return {name: found[2:] for name, found in spent.items()}


class Worker:
    """A peer in a process of its own."""

    def __init__(self, name: str, python: Path | str, model: Path, folder: Path) -> None:
        """
        Raises:
            RuntimeError: it does not run; the message says why.
        """
        if isinstance(python, str):
            raise RuntimeError(python)
        output = folder / f"{name}.safetensors"
        command = [python, HERE / "peers" / f"{name}.py", model, folder / "inputs.safetensors"]
        self._process = subprocess.Popen(
            [*map(str, command), str(output)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.version = self._process.stdout.readline().strip()
        if not self.version:
            errors = self._process.communicate()[1].strip().splitlines()
            raise RuntimeError(errors[-1] if errors else "it ended without a word")
        self.output = load_file(output)["output"]

    def sample(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def environment(envs: Path, name: str) -> Path | str:
    """The Python of a peer's environment, which is made on demand; or why it cannot be."""
    python = envs / name / "bin" / "python"
    if python.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", envs / name], check=True)
    listed = HERE / "peers" / f"{name}.txt"
    install = [python, "-m", "pip", "install", "--quiet", "-r", listed]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        subprocess.run(["rm", "-r", envs / name], check=True)
        lines = done.stderr.strip().splitlines()
        return f"it does not install: {lines[-1] if lines else done.returncode}"
    return python


if __name__ == "__main__":
    main()
