"""Capture modules, run pipelines on copies, look at the result: shared by the tests of passes."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.capture.tracing.functionalize import functionalize
from enginecast.passes.ir.base import PassContext, Site
from enginecast.passes.ir.edit import structural_copy, weight_specs, weight_tensor
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.text import diff_ir, print_ir
from enginecast.passes.registry import build

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
TOKENS = {0: Dim("batch", min=1, max=8), 1: Dim("sequence", min=2, max=32)}


def captured(
    module: nn.Module, *inputs: Tensor, dynamic: dict[int, Any] | None = None
) -> ExportedProgram:
    """The program of a module, functionalized; `dynamic` gives the dynamic dims of every input."""
    shapes: Any = tuple(dynamic for _ in inputs) if dynamic else None
    if shapes and isinstance(module, Function):
        shapes = (shapes,)  # its inputs are one variadic argument
    with torch.no_grad():
        program = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes, strict=False)
    functionalize(program)
    return program


def rewritten(
    program: ExportedProgram, pipeline: str, context: PassContext | None = None
) -> tuple[ExportedProgram, list[Site]]:
    """A copy of the program after a pipeline, and the sites of the pipeline's last pass."""
    copy = structural_copy(program)
    runs = run_pipeline(build(pipeline), copy, context or PassContext())
    return copy, list(runs[-1].sites)


def calibrated(program: ExportedProgram, *inputs: Tensor, **options: Any) -> PassContext:
    """A context with one calibration case: the inputs, or those that it was captured with."""
    given = inputs or torch.utils._pytree.tree_leaves(program.example_inputs)
    case = dict(zip(program.graph_signature.user_inputs, given, strict=True))
    return PassContext(calibration=(case,), **options)


def outputs(program: ExportedProgram, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What a program returns, as a flat tuple."""
    with torch.no_grad():
        found = program.module(check_guards=False)(*inputs)
    return tuple(t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor))


def same_bits(left: ExportedProgram, right: ExportedProgram, *inputs: Tensor) -> bool:
    """Whether two programs return equal tensors of equal dtypes; each gets inputs of its own."""
    pairs = zip(
        outputs(left, *(t.clone() for t in inputs)),
        outputs(right, *(t.clone() for t in inputs)),
        strict=True,
    )
    return all(a.dtype == b.dtype and _bits_equal(a, b) for a, b in pairs)


def _bits_equal(left: Tensor, right: Tensor) -> bool:
    if not left.is_floating_point():
        return torch.equal(left, right)
    signs = torch.equal(left.signbit(), right.signbit())
    return signs and torch.equal(left.nan_to_num(), right.nan_to_num())


def targets(program: ExportedProgram) -> list[str]:
    """The ops of a program in order: `add.Tensor`."""
    return [
        str(node.target).removeprefix("aten.")
        for node in program.graph.nodes
        if node.op == "call_function"
    ]


def count(program: ExportedProgram, *names: str) -> int:
    """How many nodes call one of these ops; a name without overload stands for all of them."""
    return sum(t in names or t.partition(".")[0] in names for t in targets(program))


def reasons(sites: Sequence[Site]) -> list[str]:
    """Why sites were left alone."""
    return [site.reason for site in sites if not site.rewritten]


def notes(sites: Sequence[Site]) -> list[str]:
    """What rewritten sites say."""
    return [site.note for site in sites if site.rewritten]


def ir_diff(before: ExportedProgram, after: ExportedProgram) -> str:
    """What a pass changed, as text for a golden file."""
    return diff_ir(print_ir(before), print_ir(after))


def reloaded(program: ExportedProgram) -> ExportedProgram:
    """The program after a round trip through a file, validated."""
    program.validate()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """Root mean square of the error over that of the reference."""
    difference = (found.double() - reference.double()).square().mean().sqrt()
    return float(difference / reference.double().square().mean().sqrt())


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def program_of(function: Callable[..., Any], *inputs: Tensor) -> ExportedProgram:
    """The program of a function, its first two dims dynamic."""
    dynamic = TOKENS if inputs[0].dim() > 1 else {0: TOKENS[1]}
    return captured(Function(function), *inputs, dynamic=dynamic)


def canonical(program: ExportedProgram) -> ExportedProgram:
    """A copy after canonicalize, which must find nothing to do in its own result."""
    after, sites = rewritten(program, "canonicalize")
    again, second = rewritten(after, "canonicalize")
    assert second == [], f"rewrites its own result: {second}"
    assert len(list(again.graph.nodes)) == len(list(after.graph.nodes))
    assert all(site.rewritten for site in sites)
    return after


def floats(*shape: int) -> Tensor:
    """Values with both zeros among them."""
    x = torch.randn(*shape)
    x.view(-1)[:2] = torch.tensor([0.0, -0.0])
    return x


class Text(nn.Module):
    """A text model's last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(ids, mask).last_hidden_state
        return hidden


class Image(nn.Module):
    """An image model's last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        hidden: Tensor = self.model(pixels).last_hidden_state
        return hidden


def seeded(model_class: Callable[..., nn.Module], config: Any) -> nn.Module:
    """A perturbed model with frozen weights, the same from run to run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval().requires_grad_(False)
        models.perturb(model)
    return model


def token_ids(batch: int, tokens: int) -> Tensor:
    """Random ids; 0 and 1 are left out because models treat them in their own ways."""
    return torch.randint(2, models.VOCABULARY, (batch, tokens))


def prompts(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and a ragged mask, the first row full and the last with one token."""
    lengths = torch.linspace(tokens, 1, batch).long()
    return token_ids(batch, tokens), (torch.arange(tokens) < lengths[:, None]).long()


class Checked(torch.fx.Interpreter):
    """Runs a program node by node; fails where a value is not of the dtype that its node says."""

    def run_node(self, n: torch.fx.Node) -> Any:
        found = super().run_node(n)
        said = n.meta.get("val")
        if isinstance(found, Tensor) and isinstance(said, Tensor):
            assert found.dtype == said.dtype, f"{n.format_node()}: {found.dtype}, not {said.dtype}"
        self.seen: dict[str, Any]
        self.__dict__.setdefault("seen", {})[n.name] = found
        return found


def values(program: ExportedProgram, *inputs: Tensor) -> dict[str, Any]:
    """Every value of a program by node name; dtypes are compared with what the nodes say."""
    specs = weight_specs(program)
    given = iter(inputs)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    arguments = [weight_tensor(program, specs[n]) if n in specs else next(given) for n in names]
    runner = Checked(program.graph_module)
    with torch.no_grad():
        runner.run(*arguments)
    return runner.seen
