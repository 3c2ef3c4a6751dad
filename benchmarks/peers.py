"""Engines on a CPU side by side with peers, each of which has an environment of its own.

    python benchmarks/peers.py [--only NAME,...] [--engines NAME,...] [--rounds N] [--minutes N]
        [--work DIR] [--out FILE.json]

One thread each, CPU time, rounds in turns across processes, ratios to eager in the same round; the
cosine is the lowest of a valid row beside eager.  Models have real shapes and seeded random
weights: times are those of trained models, errors are not.  A peer that does not install or run is
absent, with its reason.  "products" is a graph of nothing but the matrix products.

Engines and samples are kept in the work folder while the sources stay as they are, engines for all
cases of a model: their sizes are free.  A call that ends before a row is whole, after --minutes or
otherwise, loses nothing: the next goes on.  A row is written when it has all its rounds; rows that
were not asked for stay as they are.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import onnxruntime
import torch
from machine import RESULTS, machine
from onnxruntime.quantization import QuantType, quantize_dynamic
from peers_models import Case, Products, cases
from safetensors.numpy import load_file, save_file

import enginecast
from enginecast.errors import EnginecastError
from enginecast.runtime.device.machine import processor
from enginecast.runtime.sessions.onnxruntime import create_session
from enginecast.runtime.sessions.settings import Settings
from enginecast.verification.metrics import measure, row_mask

HERE = Path(__file__).parent
PEERS = {
    "openvino": ("openvino", "fp32"),
    "openvino int8": ("openvino", "int8"),
    "ctranslate2": ("ctranslate2", "fp32"),
    "ctranslate2 int8": ("ctranslate2", "int8"),
}
"""The environment of each, and what its script gets."""
ENGINES: Mapping[str, Mapping[str, str]] = {
    "fp32": {},
    "int8": {"precision": "int8"},
    "int8 of 0.998": {"precision": "int8", "max_error": "cos=0.998"},
    "openvino": {"target": "openvino"},
    "openvino of one size": {"target": "openvino"},
    "openvino bf16": {"target": "openvino", "precision": "bf16"},
    "aotinductor bf16": {"target": "aotinductor", "precision": "bf16"},
}
"""Ours, by what `enginecast.compile` gets."""
SETTINGS = {"openvino of one size": Settings(threads=1, fixed_sizes=True)}
"""With which one is loaded that is not loaded as it is by default."""
SOURCES = ("enginecast", "capture", "passes", "exporters", "verification", "runtime")
"""What samples depend on; engines on all but the last."""
Sample = Callable[[], float]
"""Runs once; gives the CPU seconds of it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of cases, with commas between")
    parser.add_argument(
        "--engines", default="fp32,int8", help=f"ours, some of {', '.join(ENGINES)}"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=20, help="no round begins after these")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "peers")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = cases()
    asked = _listed(parser, "--only", options.only, known) or list(known)
    engines = _listed(parser, "--engines", options.engines, ENGINES)
    end = time.monotonic() + 60 * options.minutes
    envs = {name: environment(options.work, name) for name in {env for env, _ in PEERS.values()}}
    for name in asked:
        if time.monotonic() > end:
            print(f"{name}: no time is left; call again to go on")
            continue
        row = Row(name, known[name](), options.work)
        row.open(engines, envs)
        done = row.sample(options.rounds, end)
        print(name, json.dumps(row.result(), indent=1), flush=True)
        if done < options.rounds:
            print(f"{name}: {done} of {options.rounds} rounds; call again to go on")
            continue
        result: dict[str, Any] = {"rows": {}}
        if options.out.exists():
            result = json.loads(options.out.read_text(encoding="utf-8"))
        result["rows"][name] = row.result()
        result["machine"] = machine()
        _write(options.out, result)


def _listed(
    parser: argparse.ArgumentParser, option: str, given: str, known: Mapping[str, object]
) -> list[str]:
    names = [name for name in given.split(",") if name]
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"{option} {', '.join(unknown)}: expected some of {', '.join(known)}")
    return names


class Row:
    """A case: all that runs it, and the samples so far.

    Args:
        name: of the case.
        work: the folder where engines and samples are kept.
    """

    def __init__(self, name: str, case: Case, work: Path) -> None:
        self._case = case
        self._folder = work / "rows" / name.replace(" ", "-")
        self._key = {"sources": _digest(SOURCES), "processor": processor()}
        if _read(self._folder / "key.json") != self._key:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            _write(self._folder / "key.json", self._key)
        self._samples: dict[str, Sample] = {}
        self._outputs: dict[str, np.ndarray] = {}
        self._absent: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        self._workers: list[Worker] = []
        torch.manual_seed(0)
        self._model = case.make().eval().requires_grad_(False)
        self._feeds = {n: np.ascontiguousarray(t.numpy()) for n, t in case.inputs.items()}
        shape = hashlib.sha256(self._model.config.to_json_string().encode()).hexdigest()
        self._engines = work / "engines" / f"{shape[:12]}-{_digest(SOURCES[:-1])[:12]}"
        self._engines.mkdir(parents=True, exist_ok=True)

    def open(self, engines: Sequence[str], envs: Mapping[str, Path | str]) -> None:
        """Make what is not there yet, and run each once."""
        case, feeds = self._case, self._feeds
        save_file(feeds, self._folder / "inputs.safetensors")
        self._make("model", lambda path: self._model.save_pretrained(path))
        self._add("eager", self._eager)
        self._make("plain", self._export_plain)
        plain = self._folder / "plain" / "model.onnx"
        self._add_file("torch.onnx", plain)
        if case.int8:
            self._make("dynamic", lambda path: _quantize_dynamic(plain, path))
            self._add_file("quantize_dynamic int8", self._folder / "dynamic" / "model.onnx")
        for kind in engines:
            if case.int8 or not kind.startswith("int8"):
                self._add_ours(kind)
        for precision in ("fp32", "int8"):
            self._add_products(precision)
        for name, (env, precision) in PEERS.items():
            if name in case.without or (precision == "int8" and not case.int8):
                continue
            try:
                worker = Worker(env, envs[env], self._folder, precision)
            except RuntimeError as error:
                self._absent[name] = str(error)
                continue
            self._workers.append(worker)
            self._versions[env] = worker.version
            self._outputs[name], self._samples[name] = worker.output, worker.sample

    def sample(self, rounds: int, end: float) -> int:
        """Rounds in turns, whose order turns around; gives how many there are now.

        Args:
            end: none begins after this time.
        """
        try:
            while len(found := self._rounds()) < rounds and time.monotonic() < end:
                order = list(self._samples)[:: -1 if len(found) % 2 else 1]
                _write(
                    self._folder / "rounds.json", [*found, {n: self._samples[n]() for n in order}]
                )
        finally:
            for worker in self._workers:
                worker.close()
        return len(found)

    def result(self) -> dict[str, Any]:
        """What the rounds so far give."""
        rounds = self._rounds()
        names = [name for name in self._samples if all(name in spent for spent in rounds)]
        ratios = {n: [spent["eager"] / spent[n] for spent in rounds] for n in names}
        reference = self._outputs["eager"]
        valid = row_mask(reference.shape, self._feeds.get("attention_mask"))
        return {
            "speed": {name: round(median(found), 3) for name, found in ratios.items() if found},
            "spread": {name: _spread(found) for name, found in ratios.items() if len(found) > 1},
            "cpu_ms": {
                name: round(1e3 * median(spent[name] for spent in rounds), 2)
                for name in names
                if rounds
            },
            "cosine": {
                name: round(measure(found, reference, valid).cosine, 6)
                for name, found in self._outputs.items()
            },
            "absent": self._absent,
            "versions": self._versions,
            "rounds": len(rounds),
            "processor": self._key["processor"],
            "commit": machine()["commit"],
        }

    def _rounds(self) -> list[dict[str, float]]:
        return _read(self._folder / "rounds.json") or []

    def _make(self, name: str, make: Callable[[Path], object]) -> None:
        """A folder, which is there whole or not at all."""
        path = self._folder / name
        if not path.exists():
            part = self._folder / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(path)

    def _add(self, name: str, call: Callable[[], Any]) -> None:
        self._outputs[name] = np.asarray(call()).astype(np.float32)
        self._samples[name] = lambda: _cpu(call)

    def _add_file(self, name: str, path: Path) -> None:
        if name not in self._case.without:
            session = create_session(path, ["CPUExecutionProvider"], 1)
            self._add(name, lambda: session.run(None, self._feeds)[0])

    def _eager(self) -> Any:
        with torch.no_grad():
            return self._model(**self._case.inputs)[self._case.output]

    def _export_plain(self, path: Path) -> None:
        given = dict(self._case.inputs)
        with torch.no_grad():
            torch.onnx.export(
                self._model, (), path / "model.onnx", kwargs=given, dynamo=True, verbose=False
            )

    def _add_ours(self, kind: str) -> None:
        """Padding is left out where a case has any."""
        name, bundle = f"enginecast {kind}", self._engines / kind.replace(" ", "-")
        refused = bundle.with_suffix(".refused.json")
        if not bundle.exists() and not refused.exists():
            start = time.process_time()
            try:
                enginecast.compile(
                    self._model,
                    bundle,
                    example=dict(self._case.inputs),
                    threads=1,
                    **ENGINES[kind],  # type: ignore[arg-type]
                )
            except EnginecastError as error:
                _write(refused, error.message)
            print(f"{bundle.name}: {time.process_time() - start:.1f} CPU seconds", flush=True)
        if refused.exists():
            self._absent[name] = _read(refused)
            return
        rows = "zero" if self._case.is_padded else "exact"
        tuned = SETTINGS.get(kind, False)
        engine = enginecast.load(bundle, threads=1, allow_code=True, pad_rows=rows, tuned=tuned)
        self._add(name, lambda: engine.run(self._feeds)[self._case.output])

    def _add_products(self, precision: str) -> None:
        if precision == "int8" and not self._case.int8:
            return
        products = Products(self._model, self._case, int8=precision == "int8")
        path = self._folder / f"products-{precision}.onnx"
        products.save(path)
        session = create_session(path, ["CPUExecutionProvider"], 1)
        feeds = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in products.feeds().items()
        }
        names = [output.name for output in session.get_outputs()]

        def run() -> None:
            session.run_with_ort_values(names, feeds)

        run()
        self._samples[f"products {precision}"] = lambda: _cpu(run)


def _digest(folders: Sequence[str]) -> str:
    files = [HERE / "peers_models.py"]
    for folder in folders:
        files += sorted((HERE.parent / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _quantize_dynamic(plain: Path, folder: Path) -> None:
    quantize_dynamic(
        plain,
        folder / "model.onnx",
        per_channel=True,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gather"],  # of Attention it makes a broken node
        use_external_data_format=True,
    )


def _spread(found: Sequence[float]) -> list[float]:
    """The first and the last tenth."""
    tenths = quantiles(found, n=10, method="inclusive")
    return [round(tenths[0], 3), round(tenths[-1], 3)]


def _cpu(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _write(path: Path, value: Any) -> None:
    """At once or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)


class Worker:
    """A peer in a process of its own."""

    def __init__(self, name: str, python: Path | str, folder: Path, precision: str) -> None:
        """
        Raises:
            RuntimeError: it does not run; the message says why.
        """
        if isinstance(python, str):
            raise RuntimeError(python)
        with (folder / f"{name}-{precision}.log").open("w+", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [str(python), str(HERE / "peers" / f"{name}.py"), str(folder), precision],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            assert self._process.stdout is not None
            self.version = ""
            for line in self._process.stdout:  # what libraries say comes before
                if line.startswith("ready "):
                    self.version = line.split()[1]
                    break
            if not self.version:
                self._process.wait()
                log.seek(0)
                errors = log.read().strip().splitlines()
                raise RuntimeError(errors[-1] if errors else "it ended without a word")
        self.output = load_file(folder / f"{name}-{precision}.safetensors")["output"]

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
    listed = HERE / "peers" / f"{name}.txt"
    installed = envs / name / "installed.txt"
    if installed.exists() and installed.read_text() == listed.read_text():
        return python
    shutil.rmtree(envs / name, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", envs / name], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "-r", listed]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"it does not install: {lines[-1] if lines else done.returncode}"
    shutil.copy(listed, installed)
    return python


if __name__ == "__main__":
    main()
