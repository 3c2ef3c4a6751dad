"""rescale-streams: every bit kept in every family, the smallest powers, and a reason where not."""

import math
from collections.abc import Callable
from typing import Any

import golden
import models
import pytest
import torch
from family import TEXT
from family_text import GEMMA, GROUPED
from family_text import T5 as T5_SIZES
from programs import (
    TOKENS,
    Text,
    calibrated,
    captured,
    ir_diff,
    notes,
    prompts,
    reasons,
    reloaded,
    rewritten,
    same_bits,
    seeded,
)
from tiny_programs import tiny_program
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Gemma3TextConfig,
    Gemma3TextModel,
    GemmaConfig,
    GemmaModel,
    UMT5Config,
    UMT5EncoderModel,
)

from enginecast.errors import PassError, SpecError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.scaled_values import scale_of
from enginecast.passes.registry import build
from enginecast.passes.rescale_streams import fitted
from enginecast.verification.program.observer import Observer

WIDTH = 16
DECODER = {**TEXT, **GROUPED, "intermediate_size": 48, "max_position_embeddings": 80}
SHARED = ("t5", "t5 relu", "llama")
MODELS: dict[str, tuple[Any, Any]] = {
    "umt5": (UMT5EncoderModel, lambda: UMT5Config(**T5_SIZES, feed_forward_proj="gated-gelu")),
    "gemma": (GemmaModel, lambda: GemmaConfig(**DECODER, head_dim=16)),
    "gemma2": (Gemma2Model, lambda: Gemma2Config(**DECODER, **GEMMA)),
    "gemma3": (Gemma3TextModel, lambda: Gemma3TextConfig(**DECODER, **GEMMA)),
}
GIVEN = "rescale-streams{k=3 j=2}"
HALF = "unify-dtype{to=fp16}"


def model_program(name: str) -> ExportedProgram:
    if name in SHARED:
        return tiny_program(name)
    model_class, config = MODELS[name]
    # A window of 6 tokens makes torch.export narrow the range of a dynamic length.
    dynamic = None if "layer_types" in vars(config()) else TOKENS
    return captured(Text(seeded(model_class, config())), *prompts(2, 9), dynamic=dynamic)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "t5 relu" else pytest.param(name, marks=pytest.mark.slow)
        for name in (*SHARED, *MODELS)
    ],
)
def test_every_family_keeps_every_bit_at_every_boundary(name: str) -> None:
    before = model_program(name)
    context = calibrated(before)
    observer = Observer(before, [Named("case", dict(context.calibration[0]))])
    (run,) = run_pipeline(build(GIVEN), program := copied(before), context, [observer])
    (check,) = observer.checks
    assert (check.failure, check.moved, check.worst_error) == ("", (), 0.0)
    assert same_bits(before, program, *prompts(2, 9))
    assert [site.rewritten for site in run.sites] == [True] * 3, reasons(run.sites)
    assert "scaled by 2^-3 (5 writers, 5 norms)" in run.sites[0].note
    scaled = {scale_of(node) for node in program.graph.nodes}
    assert {-3, -2, 0} <= scaled
    # Nothing but factors of weights is new, and values never pay for them.
    added = [n for n in program.graph.nodes if n.name not in names(before)]
    assert {str(n.target) for n in added} == {"aten.mul.Tensor"}
    assert same_bits(before, reloaded(program), *prompts(2, 9))


def names(program: ExportedProgram) -> set[str]:
    return {node.name for node in program.graph.nodes}


class Named:
    """A case of the verifier."""

    def __init__(self, name: str, inputs: dict[str, Tensor]) -> None:
        self.name, self.inputs = name, inputs


def copied(program: ExportedProgram) -> ExportedProgram:
    return rewritten(program, "rescale-streams{k=0 j=0}", calibrated(program))[0]


class Net(nn.Module):
    """Two residual blocks over values of a chosen size, read by `head`."""

    def __init__(self, head: Callable[..., Any], size: float = 1e5, *, gate: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.position = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.register_buffer("table", torch.ones(2, WIDTH))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(3))
        self.up, self.gate = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down, self.out = nn.Linear(24, WIDTH), nn.Linear(WIDTH, 4)
        self.plain = nn.LayerNorm(WIDTH)
        self.head = head
        with torch.no_grad():
            self.embed.weight.mul_(size)
            self.gate.weight.mul_(gate)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids) + self.position
        n = self.norms[0](x)
        x = x + self.down(torch.nn.functional.gelu(self.gate(n)) * self.up(n))
        n = self.norms[1](x)
        x = x + self.down(torch.relu(self.up(n)))
        return self.head(self, x)


def net(head: Callable[..., Any], size: float = 1e5, **options: Any) -> ExportedProgram:
    torch.manual_seed(0)
    module = Net(head, size, **options).eval().requires_grad_(False)
    models.perturb(module)
    ids = torch.randint(0, 32, (2, 5))
    return captured(module, ids, dynamic=TOKENS)


def last_norm(module: Any, x: Tensor) -> Tensor:
    normed: Tensor = module.norms[2](x)
    return normed


def test_the_ir_before_and_after() -> None:
    before = net(last_norm)
    after, _ = rewritten(before, "rescale-streams", calibrated(before))
    golden.check("rescale_streams.diff", ir_diff(before, after))


NOT_HOMOGENEOUS: dict[str, tuple[Callable[..., Any], str]] = {
    "norm": (lambda n, x: n.norms[2](x) + x.norm(dim=-1, keepdim=True), "linalg_vector_norm"),
    "guard": (lambda n, x: n.norms[2](x.clamp(-1e9, 1e9)), "a guard against overflow"),
    "activation": (lambda n, x: n.norms[2](x) + torch.selu(x), "selu.default reads it"),
    "attention": (
        lambda n, x: n.norms[2](x) + (x @ x.transpose(1, 2)).softmax(-1) @ n.norms[0](x),
        "",
    ),
    "itself": (lambda n, x: (n.norms[2](x), x), "it is an output"),
    "behind a table": (lambda n, x: (n.norms[2](x), x + torch.ones(WIDTH)), "it is an output"),
    "behind parts of a table": (
        lambda n, x: (n.norms[2](x), x + n.table.split(1)[1]),
        "it is an output",
    ),
    "behind a clamp": (
        lambda n, x: (n.norms[2](x), x + torch.clamp(n.norms[0](x), min=1e-6)),
        "it is an output",
    ),
    "tanh of a difference": (
        lambda n, x: torch.tanh((y := n.norms[2](x) * 200) * y - (y * y + n.norms[1](x))),
        "sub.Tensor reads it",
    ),
}


@pytest.mark.parametrize("case", NOT_HOMOGENEOUS)
def test_what_needs_values_that_fp16_does_not_hold_stays_in_fp32(case: str) -> None:
    head, reason = NOT_HOMOGENEOUS[case]
    before = net(head)
    context = calibrated(before)
    after, sites = rewritten(before, "rescale-streams", context)
    assert reason in " ".join(notes(sites)), notes(sites)
    ids = torch.randint(0, 32, (2, 5))
    assert same_bits(before, after, ids)
    half, _ = rewritten(before, f"rescale-streams,{HALF}", context)
    exact, found = (flat(program.module()(ids)) for program in (before, half))
    for wanted, given in zip(exact, found, strict=True):
        scale = float(wanted.abs().max())
        assert float((given.float() - wanted).abs().max()) < 5e-3 * scale, case
        assert given.dtype == (torch.float32 if scale > 65504 else torch.float16)
    layers = [n for n in half.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert {n.meta["val"].dtype for n in layers} == {torch.float16}  # those are what costs


def test_a_table_says_what_is_done() -> None:
    before = net(lambda n, x: (n.norms[2](x), x))
    after, _ = rewritten(before, "rescale-streams", calibrated(before))
    scaled, kept = fitted(after)
    assert (scaled.module, scaled.plain, scaled.power) == ("norms.0", "infinite", 4)
    assert scaled.headroom_bits == pytest.approx(math.log2(65504 / scaled.largest) + 4)
    assert (kept.power, kept.is_output, kept.headroom_bits) == (None, True, None)
    assert scaled.subnormal == 0.0
    loud = net(last_norm)
    loud.state_dict["embed.weight"].data[:, 1:] *= 1e-9  # 1e-4, below fp16's normal 2^-3 * 1e-4
    (one,) = fitted(rewritten(loud, "rescale-streams", calibrated(loud))[0])
    assert 0.4 < one.subnormal < 1.0


def test_an_epsilon_that_fp16_takes_for_zero_stays_in_fp32() -> None:
    class Divided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            return x / (x.sum(-1, keepdim=True) + 1e-15)

    x = torch.tensor([[1.0, 3.0], [-1.0, -2.0]])
    program, _ = rewritten(captured(Divided(), x), HALF, PassContext())
    assert program.module()(x).tolist() == [[0.25, 0.75], [0.0, 0.0]]


class Given(nn.Module):
    """What it is given is loud, and a mask has a fill; the norm reads it, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.keys = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.cat([states, states[:, -1:]], 1)
        scores = (self.norm(padded) @ self.norm(states).transpose(1, 2)) + mask
        return scores.softmax(-1), self.keys(states) * 1e-3


def test_an_input_that_fp16_does_not_hold_is_read_in_fp32() -> None:
    torch.manual_seed(0)
    states, mask = torch.randn(2, 5, WIDTH), torch.zeros(2, 6, 5)
    states[..., 1], mask[:, :, 3:] = 2e5, torch.finfo(torch.float32).min
    before = captured(Given().eval().requires_grad_(False), states, mask)
    context = PassContext(calibration=({"states": states, "mask": mask},))
    after, sites = rewritten(before, "rescale-streams", context)
    assert "stays in fp32 (max 2e+05): it is an input" in notes(sites)
    assert same_bits(before, after, states, mask)
    half, _ = rewritten(before, f"rescale-streams,{HALF}", context)
    exact, found = (program.module()(states, mask) for program in (before, half))
    for wanted, given in zip(exact, found, strict=True):
        assert float((given.float() - wanted).abs().max()) < 2e-3 * float(wanted.abs().max())
    matmuls = [n for n in half.graph.nodes if n.target is torch.ops.aten.matmul.default]
    assert {n.meta["val"].dtype for n in matmuls} == {torch.float16}


def flat(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


class Block(nn.Module):
    """A block of a UNet, whose first convolution, time and shortcut are loud."""

    def __init__(self, norm: Callable[[int], nn.Module], channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.last = norm(channels), norm(out), norm(out)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 1)
        self.time, self.shortcut = nn.Linear(6, out), nn.Conv2d(channels, out, 1)
        self.gate = nn.Linear(6, out)
        with torch.no_grad():
            nn.init.constant_(self.conv1.bias[1:2], 3e5)  # type: ignore[index]
            self.shortcut.weight[2] *= 4e6

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        h = self.conv2(nn.functional.silu(self.norm2(h)))
        h = self.shortcut(x) + self.gate(t)[:, :, None, None] * h
        h = nn.functional.interpolate(nn.functional.avg_pool2d(h, 2), scale_factor=2.0)
        h = torch.cat([*nn.functional.pad(h, (1, 1)).chunk(2, 1)], 1)
        normed: Tensor = self.last(h)
        return normed


class Last(nn.Module):
    """A LayerNorm of the channels of an image."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, **options)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return normed


class Length(nn.Module):
    """The norm of Wan's and Qwen-Image's VAE."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = nn.functional.normalize(x, dim=1) * 3.0 * self.gamma
        return normed


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "group": lambda n: nn.GroupNorm(2, n),
    "group, no affine": lambda n: nn.GroupNorm(2, n, affine=False),
    "layer": Last,
    "layer, no affine": lambda n: Last(n, elementwise_affine=False),
    "layer, tiny epsilon": lambda n: Last(n, eps=1e-12),
    "instance": lambda n: nn.InstanceNorm2d(n, affine=True),
    "normalize": Length,
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_that_subtract_the_mean_keep_every_bit(name: str) -> None:
    torch.manual_seed(0)
    module = Block(NORMS[name], 4, 8).eval().requires_grad_(False)
    inputs = (torch.randn(2, 4, 8, 8), torch.randn(2, 6))
    before = captured(module, *inputs)
    after, sites = rewritten(before, "rescale-streams", calibrated(before))
    assert len(notes(sites)) == 2, reasons(sites)  # the inner norm's input, and the sum's
    assert same_bits(before, after, *inputs)
    for pipeline, fits in ((HALF, False), (f"rescale-streams,{HALF}", True)):
        program, _ = rewritten(before, pipeline, calibrated(before))
        assert bool(program.module()(*inputs).isfinite().all()) == fits


def attends_to_itself(module: Any, x: Tensor) -> Tensor:
    h = x[:, None]
    attended = nn.functional.scaled_dot_product_attention(h, h, h, scale=1e-11)
    return last_norm(module, x + attended[:, 0])


def moves_what_is_outside(module: Any, x: Tensor) -> Tensor:
    moved = torch.sin(module.norms[1](x)).roll(1, 1)
    return last_norm(module, x + moved) + torch.selu(moved)


@pytest.mark.parametrize(
    "head",
    [
        lambda n, x: n.norms[2](torch.cat([n.position.expand(x.shape[0], 1, -1), x], 1))[:, 0],
        lambda n, x: (n.norms[2](x), torch.zeros_like(x).sum() + x.shape[1]),
        lambda n, x: n.norms[2](x + torch.sin(n.norms[1](x))),
        lambda n, x: n.norms[2](x) + n.norms[1](x.sort(-1)[0]),
        lambda n, x: (n.norms[1](x) * 1e5, n.norms[2](x))[1],
        attends_to_itself,
        moves_what_is_outside,
    ],
    ids=["class token", "shapes", "any value", "sorted", "unread", "attention", "moved"],
)
def test_what_carries_and_writes_a_stream(head: Callable[..., Any]) -> None:
    before = net(head)
    after, sites = rewritten(before, "rescale-streams", calibrated(before))
    assert notes(sites), reasons(sites)
    assert same_bits(before, after, torch.randint(0, 32, (3, 9)))


class Gated(nn.Module):
    """A feed-forward of which an activation reads a part, and whose product is loud."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 34), nn.Linear(17, 8), nn.LayerNorm(8)
        nn.init.constant_(self.up.bias[3:4], 7e4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.up(x).chunk(2, -1)
        normed: Tensor = self.norm(self.down(hidden * torch.nn.functional.silu(gate)))
        return normed


def test_a_part_of_a_tensor_is_scaled_back_as_a_part() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 7, 8)
    before = captured(Gated().eval().requires_grad_(False), x)
    after, sites = rewritten(before, "rescale-streams", calibrated(before))
    assert len(notes(sites)) == 1, reasons(sites)
    assert same_bits(before, after, x)


def test_a_case_that_is_not_finite_in_eager_is_left_to_it() -> None:
    def spread(module: Any, x: Tensor) -> Tensor:
        normed = last_norm(module, x)
        return normed + normed.std(1, keepdim=True)  # NaN for a single token

    before = net(spread)
    several, single = torch.randint(0, 32, (2, 5)), torch.zeros(1, 1, dtype=torch.long)
    cases = tuple(calibrated(before, ids).calibration[0] for ids in (several, single))
    _, sites = rewritten(before, "rescale-streams", PassContext(calibration=cases))
    assert notes(sites), reasons(sites)


def test_bad_input() -> None:
    before = net(last_norm)
    with pytest.raises(PassError, match="no calibration inputs") as caught:
        rewritten(before, "rescale-streams")
    assert "k=3 j=0" in caught.value.hint
    with pytest.raises(PassError, match=r"reach \d.*e\+05 .* is known to reach 1e\+06") as caught:
        rewritten(before, "rescale-streams{reach=1e6}", calibrated(before))
    assert "--prompts" in caught.value.hint
    with pytest.raises(SpecError, match="headroom: expected 0 to 63, got -1"):
        build("rescale-streams{headroom=-1}")
    before.state_dict["down.weight"].data[0, 0] = float("inf")
    with pytest.raises(PassError, match="already non-finite in fp32"):
        rewritten(before, "rescale-streams", calibrated(before))
