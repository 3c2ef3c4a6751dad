"""int8 convolutions and recurrences on a CPU: our engines and ONNX Runtime's own quantizer.

    python benchmarks/int8_conv.py [--small] [--rounds N] [--out FILE.json]

Models with seeded random weights, an eighth of whose channels are three times as large.  Each is
run in eager fp32, as our engines in fp32 and int8, and as what torch.onnx gives, in fp32 and
quantized by `onnxruntime.quantization`: `quantize_static` (QDQ, by channel, unsigned activations),
and `quantize_dynamic` where there is an LSTM or a GRU, which the former leaves in
floats.  Both calibrate on inputs drawn alike.  Error: relative L2 of the first output against
eager, over inputs that nobody was calibrated on.  Time: CPU time of the process, one thread, the
least of interleaved rounds; what is reported is ratios.  Size: graph and weights over those of
torch.onnx's fp32.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from large import RESULTS, machine
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from torch.nn import functional

from enginecast import load
from enginecast.compiler.request import ExportRequest
from enginecast.compiler.session import export
from enginecast.errors import EnginecastError

Arrays = Mapping[str, np.ndarray[Any, Any]]
Run = Callable[[Arrays], np.ndarray[Any, Any]]
CALIBRATION, UNSEEN = 4, 6


class Basic(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, given: int, size: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, size, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(size, size, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(size) for _ in range(2)])
        self.short = nn.Sequential()
        if stride > 1 or given != size:
            short = nn.Conv2d(given, size, 1, stride, bias=False)
            self.short = nn.Sequential(short, nn.BatchNorm2d(size))

    def forward(self, x: Tensor) -> Tensor:
        found = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(found)) + self.short(x)).relu()


class ResNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        )
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for at in range(4):
            blocks += [Basic(sizes[at], sizes[at + 1], 2 if at else 1)]
            blocks += [Basic(sizes[at + 1], sizes[at + 1], 1)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(8 * width, 100)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.stem(pixels)).mean((2, 3)))
        return found


class Inverted(nn.Module):
    """A block of MobileNet v2."""

    def __init__(self, size: int) -> None:
        super().__init__()
        wide = 6 * size
        self.parts = nn.Sequential(
            *(nn.Conv2d(size, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, size, 1, bias=False), nn.BatchNorm2d(size)),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.parts(x) + x
        return found


class MobileNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, width, 3, 4, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6())
        self.parts = nn.Sequential(*stem, *(Inverted(width) for _ in range(4)))
        self.head = nn.Linear(width, 100)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.head(self.parts(pixels).mean((2, 3)))
        return found


class Residual(nn.Module):
    """A block of a diffusion UNet or VAE."""

    def __init__(self, given: int, size: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, given), nn.GroupNorm(8, size)])
        self.first = nn.Conv2d(given, size, 3, padding=1)
        self.second = nn.Conv2d(size, size, 3, padding=1)
        self.short = nn.Conv2d(given, size, 1) if given != size else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(functional.silu(self.norms[0](x)))
        found = self.second(functional.silu(self.norms[1](found)))
        whole: Tensor = self.short(x) + found
        return whole


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.down = (
            nn.Conv2d(4, width, 3, padding=1),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
        )
        self.up, self.leave = (
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.Conv2d(width, 4, 3, padding=1),
        )
        self.blocks = nn.ModuleList(
            [Residual(width, width), Residual(2 * width, 2 * width), Residual(2 * width, width)]
        )
        self.norm = nn.GroupNorm(8, width)

    def forward(self, pixels: Tensor) -> Tensor:
        kept = self.blocks[0](self.enter(pixels))
        found = functional.interpolate(self.blocks[1](self.down(kept)), scale_factor=2.0)
        found = self.blocks[2](torch.cat([kept, self.up(found)], 1))
        last: Tensor = self.leave(functional.silu(self.norm(found)))
        return last


class Decoder(nn.Module):
    """Of a VAE."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = (
            nn.Conv2d(4, 2 * width, 3, padding=1),
            nn.Conv2d(width, 3, 3, padding=1),
        )
        self.blocks = nn.ModuleList([Residual(2 * width, 2 * width), Residual(2 * width, width)])
        self.ups = nn.ModuleList([nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in range(2)])
        self.norm = nn.GroupNorm(8, width)

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.enter(pixels)
        for block, up in zip(self.blocks, self.ups, strict=True):
            found = block(up(functional.interpolate(found, scale_factor=2.0)))
        last: Tensor = self.leave(functional.silu(self.norm(found)))
        return last


class Pitch(nn.Module):
    """Convolutions over sound, the first of them long, as in crepe."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [4 * width, width, width, 2 * width]
        parts: list[nn.Module] = [nn.Conv1d(1, sizes[0], 512, 4, 254), nn.ReLU()]
        for at in range(3):
            parts += [nn.BatchNorm1d(sizes[at]), nn.MaxPool1d(2)]
            parts += [nn.Conv1d(sizes[at], sizes[at + 1], 64, padding="same"), nn.ReLU()]
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(2 * width, 60)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.head(self.parts(pixels).mean(2))
        return found


class Upsampler(nn.Module):
    """Transposed convolutions over pictures, as in a U-Net of segmentation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(8, 4 * width, 3, padding=1), nn.ReLU())
        parts: list[nn.Module] = []
        for at, kernel in enumerate((2, 4)):
            size = 4 * width >> at
            parts += [nn.ConvTranspose2d(size, size // 2, kernel, 2, kernel // 2 - 1)]
            parts += [nn.BatchNorm2d(size // 2), nn.ReLU()]
            parts += [nn.Conv2d(size // 2, size // 2, 3, padding=1), nn.ReLU()]
        self.parts, self.leave = nn.Sequential(*parts), nn.Conv2d(width, 4, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.leave(self.parts(self.enter(pixels)))
        return found


class Vocoder(nn.Module):
    """Transposed convolutions over sound, as in HiFi-GAN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, sizes = nn.Conv1d(20, 4 * width, 7, padding=3), (4 * width, 2 * width, width)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(a, b, 16, 8, 4) for a, b in itertools.pairwise(sizes)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv1d(b, b, 3, padding=d, dilation=d) for d in (1, 3))
            for b in sizes[1:]
        )
        self.leave = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.enter(pixels)
        for up, block in zip(self.ups, self.blocks, strict=True):
            found = up(functional.leaky_relu(found, 0.1))
            for conv in block:  # type: ignore[attr-defined]
                found = found + conv(functional.leaky_relu(found, 0.1))
        last: Tensor = self.leave(found).tanh()
        return last


class Tagger(nn.Module):
    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(width, width, 2, batch_first=True, bidirectional=True)  # type: ignore[call-arg]
        self.head = nn.Linear(2 * width, 20)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(pixels)[0])
        return found


def models(small: bool) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Name, model, shape of its input."""
    width, side = (16, 64) if small else (64, 160)
    yield "resnet-18", ResNet(width), (1, 3, side, side)
    yield "mobilenet", MobileNet(width // 2), (1, 3, side, side)
    yield "unet", UNet(width), (1, 4, side // 4, side // 4)
    yield "vae decoder", Decoder(width), (1, 4, side // 8, side // 8)
    yield "pitch, 1-d", Pitch(width), (4, 1, 1024)
    yield "upsampler", Upsampler(width), (1, 8, side // 8, side // 8)
    yield "vocoder, 1-d", Vocoder(width), (1, 20, 32)
    yield "lstm tagger", Tagger(4 * width, nn.LSTM), (1, 48, 4 * width)
    yield "gru tagger", Tagger(4 * width, nn.GRU), (1, 48, 4 * width)
    yield "gru tagger, 512 units", Tagger(8 * width, nn.GRU), (1, 48, 8 * width)


def with_outliers(model: nn.Module) -> nn.Module:
    """Statistics of norms, and channels that are louder than the others."""
    drawn = torch.Generator().manual_seed(0)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(0, 0.1, generator=drawn)
            part.running_var.uniform_(0.5, 1.5, generator=drawn)
        elif isinstance(part, nn.Conv1d | nn.Conv2d):
            part.weight.data[::8] *= 3
        elif isinstance(part, nn.ConvTranspose1d | nn.ConvTranspose2d):
            part.weight.data[:, ::8] *= 3
    return model.eval().requires_grad_(False)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """What `quantize_static` calibrates on."""

    def __init__(self, given: list[Arrays]) -> None:
        self._given = iter(given)

    def get_next(self) -> Arrays | None:
        return next(self._given, None)


def factory_of(name: str, small: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its example input."""
    torch.manual_seed(0)
    _, model, shape = next(found for found in models(small) if found[0] == name)
    return with_outliers(model), {"pixels": drawn(shape, 0)}


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(name: str, small: bool, rounds: int) -> dict[str, Any]:
    """All rows of one model."""
    model, example = factory_of(name, small)
    shape = tuple(example["pixels"].shape)
    runs: dict[str, Run] = {"eager fp32": lambda given: _eager(model, given)}
    sizes: dict[str, int] = {}
    notes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        at = Path(folder)
        for precision in ("fp32", "int8"):
            bundle = at / precision
            request = ExportRequest(model, bundle, precision=precision, example=example, threads=1)
            try:
                done = export(request)
            except EnginecastError as error:
                notes[f"enginecast {precision}"] = str(error)
                continue
            row = f"enginecast {precision}"
            if done.bundle is None:
                notes[row] = list(done.report.verdict.reasons)
                continue
            files = [bundle / "engine.onnx", *bundle.glob("weights*.safetensors")]
            sizes[row] = sum(file.stat().st_size for file in files)
            engine = stack.enter_context(load(bundle, threads=1))
            runs[row] = lambda given, engine=engine: next(iter(engine.run(dict(given)).values()))
            if precision == "int8":
                notes["layers"] = _choices(bundle / "plan.json")
                notes["kept"] = _kept(bundle / "plan.json")
        for row, path in _peers(model, shape, at).items():
            files = [path, *path.parent.glob(f"{path.name}.data")]
            sizes[row] = sum(file.stat().st_size for file in files)
            runs[row] = _session(path)
        errors = _errors(runs, shape)
        times = _times(runs, {"pixels": drawn(shape, 1).numpy()}, rounds)
    fp32 = "torch.onnx fp32"
    rows = {
        row: {
            "speed over eager": round(times["eager fp32"] / times[row], 2),
            "speed over ONNX Runtime fp32": round(times[fp32] / times[row], 2),
            "error": float(f"{errors[row]:.2g}"),
            **({"size": round(sizes[row] / sizes[fp32], 2)} if row in sizes else {}),
        }
        for row in runs
    }
    return {"input": list(shape), "rows": rows, **notes}


def _eager(model: nn.Module, given: Arrays) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: Tensor = model(torch.from_numpy(given["pixels"]))
    return found.numpy()


def _peers(model: nn.Module, shape: tuple[int, ...], folder: Path) -> dict[str, Path]:
    plain, ready = folder / "plain.onnx", folder / "ready.onnx"
    with torch.no_grad():
        torch.onnx.export(
            model,
            (),
            plain,
            kwargs={"pixels": drawn(shape, 0)},
            dynamo=True,
            opset_version=18,
            external_data=False,
            verbose=False,
        )
    quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
    found = {"torch.onnx fp32": plain, "quantize_static": folder / "static.onnx"}
    reader = Reader([{"pixels": drawn(shape, 50 + seed).numpy()} for seed in range(CALIBRATION)])
    quantize_static(
        str(ready),
        str(found["quantize_static"]),
        reader,
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=[
            "Conv",
            "ConvTranspose",
            "Gemm",
            "MatMul",
            "Add",
            "MaxPool",
            "Relu",
            "Clip",
        ],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    if any(isinstance(part, nn.LSTM | nn.GRU) for part in model.modules()):
        found["quantize_dynamic"] = folder / "dynamic.onnx"
        kinds = ["LSTM", "GRU", "MatMul"]
        quantize_dynamic(
            str(plain),
            str(found["quantize_dynamic"]),
            per_channel=True,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=kinds,
        )
    return found


def _session(path: Path) -> Run:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, settings, ["CPUExecutionProvider"])
    return lambda given: session.run(None, dict(given))[0]


def _errors(runs: Mapping[str, Run], shape: tuple[int, ...]) -> dict[str, float]:
    lost = dict.fromkeys(runs, 0.0)
    whole = 0.0
    for seed in range(UNSEEN):
        given = {"pixels": drawn(shape, 100 + seed).numpy()}
        wanted = runs["eager fp32"](given).astype(np.float64)
        whole += float(np.square(wanted).sum())
        for row, run in runs.items():
            lost[row] += float(np.square(run(given) - wanted).sum())
    return {row: (error / whole) ** 0.5 for row, error in lost.items()}


def _times(runs: Mapping[str, Run], given: Arrays, rounds: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {row: [] for row in runs}
    for index in range(rounds + 2):
        for row in list(runs) if index % 2 else list(reversed(runs)):
            start = time.process_time()
            runs[row](given)
            spent[row].append(time.process_time() - start)
    return {row: min(values[2:]) for row, values in spent.items()}


def _kept(path: Path) -> dict[str, str]:
    """Layers of a plan that stay in floats, and why."""
    layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
    return {layer["module"]: layer["reason"] for layer in layers if layer["choice"] == "keep"}


def _choices(path: Path) -> dict[str, int]:
    """How many layers of a plan got which form."""
    found: dict[str, int] = {}
    for layer in json.loads(path.read_text(encoding="utf-8"))["layers"]:
        form = f"{layer['kind']} {layer['choice']}"
        found[form] = found.get(form, 0) + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny models, a few rounds")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--model", action="append", help="of these alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine() | {"threads": 1}}
    rounds = options.rounds or (5 if options.small else 25)
    names = [name for name, _, _ in models(options.small)]
    result["models"] = {}
    for name in options.model or names:
        result["models"][name] = compare(name, options.small, rounds)
        print(name, json.dumps(result["models"][name], sort_keys=True), flush=True)
    out = options.out or RESULTS / f"int8-conv{'-small' if options.small else ''}.json"
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result["models"], indent=1, sort_keys=True))
    print(out)


if __name__ == "__main__":
    main()
