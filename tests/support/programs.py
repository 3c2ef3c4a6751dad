"""Capture modules, run pipelines on copies, look at the result: shared by the tests of passes."""

import io
from collections.abc import Callable
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from enginecast.passes.ir.base import PassContext, Site
from enginecast.passes.ir.edit import weight_specs, weight_tensor
from enginecast.testing import Function as Function
from enginecast.testing import count as count
from enginecast.testing import diff, run_on, trace
from enginecast.testing import notes as notes
from enginecast.testing import outputs as outputs
from enginecast.testing import reasons as reasons
from enginecast.testing import relative_error as relative_error
from enginecast.testing import same_bits as same_bits
from enginecast.testing import targets as targets

captured, ir_diff = trace, diff
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
TOKENS = {0: Dim("batch", min=1, max=8), 1: Dim("sequence", min=2, max=32)}


def rewritten(
    program: ExportedProgram, pipeline: str, context: PassContext | None = None
) -> tuple[ExportedProgram, list[Site]]:
    """A copy of the program after a pipeline, and the sites of the pipeline's last pass."""
    copy, runs = run_on(program, pipeline, context or PassContext())
    return copy, list(runs[-1].sites)


def calibrated(program: ExportedProgram, *inputs: Tensor, **options: Any) -> PassContext:
    """A context with one calibration case: the inputs, or those that it was captured with."""
    given = inputs or torch.utils._pytree.tree_leaves(program.example_inputs)
    case = dict(zip(program.graph_signature.user_inputs, given, strict=True))
    return PassContext(calibration=(case,), **options)


def reloaded(program: ExportedProgram) -> ExportedProgram:
    """The program after a round trip through a file, validated."""
    program.validate()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


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
