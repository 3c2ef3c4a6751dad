"""Dtypes: fp64, halves, small integers, complex, mixtures; modules in train mode."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, marks, normal, whole

CASES = Group("dtypes", "fp64, low precision, small integers, train mode")
right, either = CASES.right, CASES.either
X = normal(3, 8)
D = X.double()


class Wide(nn.Module):
    """fp64 because it has to be."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + 1e9) - 1e9


class Within(nn.Module):
    """fp64 inside alone."""

    def forward(self, x: Tensor) -> Tensor:
        d = x.double()
        return ((d + 1e9).square() - (d - 1e9).square()).div(4e9).float()


class Trained(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner: nn.Module = {
            "dropout": nn.Dropout(0.5),
            "batch norm": nn.BatchNorm1d(8),
            "alpha dropout": nn.AlphaDropout(0.3),
            "rrelu": nn.RReLU(),
            "instance norm": nn.InstanceNorm1d(8, track_running_stats=True),
        }[kind]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * 1.5
        result: Tensor = self.inner(x)
        return result


class Half(nn.Module):
    """A layer that was left in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = nn.Linear(8, 8).to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.to(self.dtype))
        return result.float()


class ComplexBuffer(nn.Module):
    rotation: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(4.0)
        self.register_buffer("rotation", torch.polar(torch.ones(4), angles))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(x.shape[0], 4, 2))
        return torch.view_as_real(pairs * self.rotation).flatten(1)


class ComplexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(normal(8, 3), normal(8, 3, seed=1)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, -x) @ self.weight)


either("wide", Wide, x=D, is_quick=True)
either("wide, sum", lambda self, x: (x + 1e12).sum(-1) - 8e12, x=D)
either("wide, small differences", lambda self, x: (1 + x * 1e-10) - 1, x=D)
either("wide, exp", lambda self, x: (x * 100).exp(), x=D)
either("wide, plain", lambda self, x: x * 2 + 1, x=D)
either("wide, norm", lambda self, x: F.layer_norm(x, (8,)), x=D)
either("wide inside", Within, x=X)
either("wide accumulation", lambda self, x: x.double().cumsum(-1).float(), x=X)
either("wide sum", lambda self, x: x.sum(-1, dtype=torch.float64).float(), x=X)
either("wide constant", lambda self, x: x * torch.tensor(0.1, dtype=torch.float64), x=X)
either(
    "wide weights and narrow input",
    lambda self, x: x @ torch.eye(8, dtype=torch.float64).float(),
    x=X,
)
for kind in ("dropout", "batch norm", "alpha dropout", "rrelu", "instance norm"):
    either(
        f"train mode, {kind}",
        partial(Trained, kind),
        x=X if kind != "instance norm" else normal(3, 8, 4),
    )
for dtype in (torch.float16, torch.bfloat16, torch.float64):
    either(f"a layer in {str(dtype).removeprefix('torch.')}", partial(Half, dtype), x=X)
either("half input", lambda self, x: x * 2 + 0.1, x=X.half())
either("half input and softmax", lambda self, x: (x * 10).softmax(-1), x=X.half())
either("bfloat16 inside", lambda self, x: (x.bfloat16() * 1.01).float(), x=X)
either("half inside", lambda self, x: (x.half() * 1.001).float(), x=X)
right("half overflow inside", lambda self, x: (x * 1e5).half().float(), x=X)
for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
    name = str(dtype).removeprefix("torch.")
    either(f"{name} input", lambda self, i: i * 3 + 100, i=whole(3, 4, high=100).to(dtype))
    either(f"{name} inside", lambda self, i, dtype=dtype: (i.to(dtype) + 200).long(), i=whole(3, 4))
    either(f"{name} sum", lambda self, i: i.sum(-1), i=whole(3, 4, high=100).to(dtype))
    either(f"{name} division", lambda self, i: i // 3 + i % 3, i=whole(3, 4, high=100).to(dtype))
either("complex buffer", ComplexBuffer, x=X, is_quick=True)
either(
    "complex product",
    lambda self, x, y: torch.view_as_real(torch.complex(x, y) * torch.complex(y, x)),
    x=X,
    y=normal(3, 8, seed=2),
)
either("fourier", lambda self, x: torch.fft.rfft(x).abs(), x=X)
either("fourier there and back", lambda self, x: torch.fft.irfft(torch.fft.rfft(x), n=8), x=X)
either(
    "spectrogram",
    lambda self, x: torch.stft(x, 16, 4, window=torch.hann_window(16), return_complex=True).abs(),
    x=normal(2, 64),
)
either("angle", lambda self, x, y: torch.complex(x, y).angle(), x=X, y=normal(3, 8, seed=2))
right("complex layer", ComplexLayer, x=X)
right(
    "inverse transform of frames",
    lambda self, x: torch.istft(torch.complex(x, -x), 16, 4, window=torch.hann_window(16)),
    x=normal(2, 9, 12),
)
right("complex output", lambda self, x: torch.complex(x, -x), x=X)
right("booleans added", lambda self, m: m + m, m=marks(3, 4))
right("booleans summed", lambda self, m: m.sum(-1), m=marks(3, 4))
right("boolean times float", lambda self, x, m: m * x + m, x=X, m=marks(3, 8))
right("boolean subtraction by xor", lambda self, m: m ^ m.flip(-1), m=marks(3, 4))
right("boolean minimum", lambda self, m: (m.all(-1), m.any(-1), m.min(), (~m).max()), m=marks(3, 4))
right("boolean products", lambda self, m: m.prod(-1), m=marks(3, 4))
right("mean of booleans", lambda self, m: m.float().mean(-1), m=marks(3, 4))
right("int plus float scalar", lambda self, i: i + 0.5, i=whole(3, 4))
right("int times bool", lambda self, i, m: i * m, i=whole(3, 4), m=marks(3, 4))
right(
    "where of dtypes", lambda self, x, i, m: torch.where(m, x, i), x=X, i=whole(3, 8), m=marks(3, 8)
)
right("cat of dtypes", lambda self, x, i: torch.cat([x, i], -1), x=X, i=whole(3, 4))
right("float scalar tensor", lambda self, x: x * torch.tensor(2), x=X)
right("int32 index", lambda self, x, i: x[:, i.int()], x=X, i=whole(4, high=8))
right("uint8 mask by comparison", lambda self, x: (x > 0).to(torch.uint8) * 255, x=X)
right("int64 average by float", lambda self, i: i.sum(-1) / i.shape[-1], i=whole(3, 4))
right("argmax in int32", lambda self, x: x.argmax(-1).int(), x=X)
either("outer in fp16", lambda self, x: x[:, :, None] * x[:, None] * 100, x=X, precision="fp16")
either("small in fp16", lambda self, x: x * 1e-6 * 1e6, x=X, precision="fp16")
either("large in fp16", lambda self, x: (x * 1e4).square().sqrt(), x=X, precision="fp16")
either(
    "epsilon in fp16",
    lambda self, x: x / (x.norm(dim=-1, keepdim=True) + 1e-8),
    x=X,
    precision="fp16",
)
either(
    "mask in fp16",
    lambda self, x, m: (x @ x.mT).masked_fill(~m[:, None], -1e9).softmax(-1) @ x,
    x=normal(2, 5, 8),
    m=marks(2, 5),
    precision="fp16",
)
either(
    "row all masked in fp16",
    lambda self, x, m: (x @ x.mT).masked_fill(~m[:, None], float("-inf")).softmax(-1) @ x,
    x=normal(2, 5, 8),
    m=torch.ones(2, 5).bool(),
    precision="fp16",
)
either("layer in bf16", partial(nn.Linear, 8, 8), input=X, precision="bf16")
either("norm in bf16", partial(nn.LayerNorm, 8), input=X, precision="bf16")
either("conv in bf16", partial(nn.Conv1d, 3, 4, 3), input=normal(2, 3, 9), precision="bf16")
either("layer in int8", partial(nn.Linear, 8, 8), input=normal(4, 8), precision="int8")
either(
    "write then layer in bf16",
    lambda self, x: (y := x * 2, y[:, 0].clamp_(max=0.1), y @ torch.eye(8))[-1],
    x=X,
    precision="bf16",
)
