"""Components of diffusion pipelines through plain `torch.onnx.export(dynamo=True)`, in tiny form.

    python benchmarks/diffusion_peers.py [--only NAME ...] [--out FILE.json]

Each component is exported twice, as its users would: with a batch that varies (`Dim("batch")`) and
with every size that `enginecast export` lets vary (named ones; else `Dim.AUTO`).  Where that fails,
the program of `torch.export.export` is given instead of the module.  ONNX Runtime runs the file at
the example, with another batch and other timesteps, and in other sizes; eager gives what is right.
A row has `right`, `wrong` or `fails` for each place; `-`: no other size is derived; `limit`: the
exports of the component together had not ended after 20 CPU minutes, runs of eager included.
What optimum makes of whole pipelines is there, too: see `peers/optimum_diffusion.py`.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import onnxruntime
import torch
from large import RESULTS, machine
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from test_components import ENTRIES, small
from tiny_components import CONFIGS, save

from enginecast.capture.inputs.derive.derive import derive
from enginecast.capture.inputs.derive.diffusion import bound
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import BATCH, InputSpec, named_dims
from enginecast.capture.sources.diffusion import ComponentSource
from enginecast.capture.sources.source import open_source

OTHER_SIZES = {"batch": 3, "height": 8, "width": 12, "text": 5, "patches": 24, "frames": 3}
CLOSE = 1e-3
"""Relative error of fp32, at most; a wrong file is off by more than a hundred times as much."""
WHERE = ("example", "batch and timesteps", "sizes")
GIVEN = ("module", "program")
RIGHT, NONE = "right", "-"
MOST_SECONDS = 1200
"""CPU seconds that all exports of one component may take."""


class LimitError(BaseException):
    """The time is up; nothing that torch catches."""


class Part(nn.Module):
    """A method of an autoencoder as a module, as a user would write it."""

    def __init__(self, model: nn.Module, entry: str) -> None:
        super().__init__()
        self.model, self.entry = model, entry

    def forward(self, x: Tensor) -> Tensor:
        found = getattr(self.model, self.entry)(x, return_dict=False)[0]
        return found.parameters if hasattr(found, "parameters") else found


class Peer:
    """A component, its inputs, and the file that torch.onnx makes of it."""

    def __init__(self, name: str, entry: str, folder: Path) -> None:
        self.ends = time.process_time() + MOST_SECONDS
        kind, _ = CONFIGS[name]
        save(name, folder)
        source = bound(open_source(str(folder), component=small(entry, name)))
        assert isinstance(source, ComponentSource)
        assert source.call is not None
        self.call = source.call
        self.specs = derive(source)
        model = getattr(diffusers, kind).from_pretrained(folder).eval()
        for layer in model.modules():  # a ControlNet's last ones, so that all it gives is zero
            if isinstance(layer, nn.Conv2d) and not layer.weight.any():
                nn.init.normal_(layer.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        self.module = Part(model, entry).eval() if entry else model
        self.is_part = bool(entry)

    def sizes(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Those of the example, but for the wanted ones, within what is derived."""
        dims = named_dims(self.specs)
        found = example_sizes(self.specs)
        for name in dims.keys() & wanted.keys():
            found[name] = min(max(wanted[name], dims[name].minimum), dims[name].maximum)
        return found

    def arguments(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """What the module is called with, by name."""
        if self.is_part:
            return {"x": next(iter(tensors.values()))}
        return {**self.call.filled(tensors), "return_dict": False}

    def export(self, file: Path, varying: str, given: str) -> None:
        example = sample(self.specs, example_sizes(self.specs), 0)
        dims = {spec.name: self._dims(spec, varying) for spec in self.specs}
        kwargs = self.arguments(example)
        shapes = {name: _only_shapes(each) for name, each in self.arguments(dims).items()}
        if given == "program":
            program = torch.export.export(self.module, (), kwargs, dynamic_shapes=shapes)
            torch.onnx.export(program, (), file, dynamo=True, verbose=False)
            return
        torch.onnx.export(
            self.module, (), file, kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, verbose=False
        )

    def _dims(self, spec: InputSpec, varying: str) -> "Shapes":
        found = Shapes()
        for number, dim in enumerate(spec.dims):
            if dim.name == BATCH or (dim.name is not None and varying == "named"):
                found[number] = torch.export.Dim(dim.name, min=dim.minimum, max=dim.maximum)
            elif dim.name is not None and varying == "auto":
                found[number] = torch.export.Dim.AUTO
        return found

    def compare(self, session: Any, sizes: Mapping[str, int], seed: int) -> float:
        """Relative error of the first output, the largest."""
        tensors = sample(self.specs, sizes, seed)
        with torch.no_grad():
            wanted = self.module(**self.arguments(tensors))
        while isinstance(wanted, (list, tuple)):
            wanted = wanted[0]
        taken = {each.name for each in session.get_inputs()}
        named = {"x": next(iter(tensors.values()))} if self.is_part else tensors
        feeds = {name: tensor.numpy() for name, tensor in named.items() if name in taken}
        found = torch.from_numpy(session.run(None, feeds)[0])
        if found.shape != wanted.shape:
            return float("inf")
        return float((found - wanted).norm() / wanted.norm())

    def outcomes(
        self, file: Path, given: str, varying: str, runs: Mapping[str, tuple[dict[str, int], int]]
    ) -> dict[str, str]:
        """What becomes of one export, at each place."""
        over = f"limit: not done when {MOST_SECONDS} CPU seconds were over"
        found = dict.fromkeys(runs, over)
        try:
            with limited(self.ends - time.process_time()):
                self._outcomes(found, file, given, varying, runs)
        except LimitError:
            pass
        return found

    def _outcomes(
        self,
        found: dict[str, str],
        file: Path,
        given: str,
        varying: str,
        runs: Mapping[str, tuple[dict[str, int], int]],
    ) -> None:
        try:
            with torch.no_grad():
                self.export(file, varying, given)
            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        except Exception as error:  # torch raises any kind
            found |= dict.fromkeys(runs, f"fails: {_first(error)}")
            return
        for where, (sizes, seed) in runs.items():
            try:
                error = self.compare(session, sizes, seed)
            except Exception as refused:
                found[where] = f"fails: {_first(refused)}"
                continue
            found[where] = RIGHT if error <= CLOSE else f"wrong: off by {error:.2g}"


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise LimitError where the process has taken so many CPU seconds more."""
    if seconds <= 0:
        raise LimitError

    def stop(number: int, frame: object) -> None:
        raise LimitError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 5.0)  # again, where it was caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Shapes(dict[int, Any]):
    """Dimensions of one input that vary."""


def _only_shapes(value: Any) -> Any:
    """The dimensions of an argument; None for what is not a tensor."""
    if isinstance(value, Shapes):
        return dict(value)
    if isinstance(value, dict):
        return {name: _only_shapes(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_only_shapes(each) for each in value)
    return None


def measure(name: str, entry: str) -> dict[str, Any]:
    """Outcomes of one component."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        peer = Peer(name, entry, Path(scratch) / "model")
        others = peer.sizes(OTHER_SIZES)
        batch = peer.sizes({BATCH: 3})
        has_sizes = any(others[each] != batch[each] for each in others)
        asked = {BATCH: {WHERE[0]: (peer.sizes({}), 1), WHERE[1]: (batch, 7)}}
        if has_sizes:
            asked["sizes"] = {WHERE[2]: (others, 8)}
        for what, runs in asked.items():
            for given, varying in product(GIVEN, (BATCH,) if what == BATCH else ("named", "auto")):
                tried = peer.outcomes(Path(scratch) / "model.onnx", given, varying, runs)
                found |= {f"{name} ({given}, {varying})": each for name, each in tried.items()}
                if all(each == RIGHT for each in tried.values()):
                    break
            for where in runs:
                every = [each for name, each in found.items() if name.startswith(f"{where} (")]
                found[where] = next((each for each in every if each == RIGHT), every[0])
        if not has_sizes:
            found[WHERE[2]] = NONE
    return found


def _first(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {' '.join(lines[:2])[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(CONFIGS))
    parser.add_argument("--out", type=Path, default=RESULTS / "diffusion-peers.json")
    options = parser.parse_args()
    found_machine = machine()  # before the run: the commit that is measured
    made = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    rows = made.get("rows", {})
    for name, entry in ENTRIES:
        if options.only and name not in options.only:
            continue
        row = measure(name, entry)
        rows[f"{name} {entry}".strip()] = row
        print(name, entry, json.dumps(row), file=sys.stderr, flush=True)
        counts = {
            where: Counter(row[where].partition(":")[0] for row in rows.values()) for where in WHERE
        }
        made |= {"rows": rows, "counts": counts, "machine": found_machine}
        options.out.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
