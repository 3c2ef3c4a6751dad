"""Write the smallest program as a script that stands alone: ops, seeded weights and inputs."""

import inspect
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from enginecast.errors import UsageError
from enginecast.passes.ir.options import spec_from_pass
from enginecast.passes.ir.spec import render
from enginecast.plugins import package_of
from enginecast.reduce.shrink import Reduced, fails_alike
from enginecast.reduce.specimen import Specimen
from enginecast.version import __version__

SCRIPT, TENSORS = "reproduce.py", "tensors.safetensors"
FAILS = 1
"""The exit code of a script that shows the failure."""
LITERAL = 16
"""Elements up to which a tensor that no seed can stand for is written out."""
_SECONDS = 300.0


@dataclass(frozen=True)
class Recipe:
    """How the script makes a tensor."""

    text: str
    tensor: Tensor
    stored: bool = False


def write(reduced: Reduced, folder: Path) -> str:
    """Write the script to a new folder, run it, and return what it printed.

    Raises:
        UsageError: an op cannot be written, or the script does not fail as the program did.
    """
    specimen, recipes = _seeded(reduced)
    text = _text(reduced, specimen, recipes)
    folder.mkdir()
    stored = {name: one.tensor.contiguous() for name, one in recipes.items() if one.stored}
    if stored:
        from safetensors.torch import save_file

        save_file(stored, folder / TENSORS)
    (folder / SCRIPT).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    shown = done.stdout.strip()
    if done.returncode != FAILS or not _is_told(reduced, shown):
        raise UsageError(
            f"{folder / SCRIPT}: does not fail as the program does: {shown or done.stderr.strip()}",
            hint="The pass may depend on more than the program: run it with the model itself.",
        )
    return shown


def _is_told(reduced: Reduced, shown: str) -> bool:
    """Whether what a script printed is the failure of the program, of the same kind and place."""
    failure, told = reduced.failure, shown.rpartition("fails: ")[2]
    if not failure.where:
        return failure.pass_name in told
    return failure.kind in told and f"{Path(failure.where).name}" in told


def _seeded(reduced: Reduced) -> tuple[Specimen, dict[str, Recipe]]:
    """The specimen with seeded tensors wherever it fails with them, and how each is made."""
    specimen = reduced.specimen
    weights = _weights(specimen.module)
    names = [*weights, *(node.name for node in _inputs(specimen.module))]
    real = dict(zip(names, [*weights.values(), *specimen.inputs], strict=True))
    seeds = {name: _seed(tensor, number) for number, (name, tensor) in enumerate(real.items())}
    kept = {name: _kept(name, tensor) for name, tensor in real.items()}

    def made(chosen: Mapping[str, Recipe]) -> Specimen:
        tensors = {name: one.tensor for name, one in chosen.items()}
        return specimen.with_tensors(
            {name: tensors[name] for name in weights},
            [tensors[name] for name in names if name not in weights],
        )

    recipes = {name: seeds[name] or kept[name] for name in names}
    if not fails_alike(reduced, made(recipes)):  # one by one, then
        recipes = dict(kept)
        for name, seed in seeds.items():
            if seed is not None and fails_alike(reduced, made({**recipes, name: seed})):
                recipes[name] = seed
    return made(recipes), recipes


def _seed(tensor: Tensor, seed: int) -> Recipe | None:
    """A drawn tensor like this one; None: there is no draw for it."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if tensor.numel() == 0 or tensor.is_complex():
        return None
    if tensor.is_floating_point():
        found = tensor.double()
        if not found.isfinite().all():
            return None
        mean, std = (float(f"{float(one):.2g}") for one in (found.mean(), found.std(correction=0)))
        text = f"normal({seed}, {shape}, {dtype}, mean={mean}, std={std})"
        return Recipe(text, normal(seed, shape, dtype, mean=mean, std=std))
    least, most = int(tensor.min()), int(tensor.max())
    text = f"integers({seed}, {shape}, {dtype}, {least}, {most})"
    return Recipe(text, integers(seed, shape, dtype, least, most))


# The script has the source of these two.
def normal(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, *, mean: float, std: float
) -> Tensor:
    """Floats from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return (mean + std * torch.randn(shape, generator=generator)).to(dtype)


def integers(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, least: int, most: int
) -> Tensor:
    """Integers or booleans from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, most + 1, shape, generator=generator).to(dtype)


def _kept(name: str, tensor: Tensor) -> Recipe:
    """The tensor itself: written out, or in a file beside the script."""
    tensor = tensor.detach().cpu().clone()
    if tensor.numel() <= LITERAL and not tensor.is_complex():
        text = f"torch.tensor({_literal(tensor.tolist())}, dtype={tensor.dtype})"
        return Recipe(f"{text}.reshape({tuple(tensor.shape)})", tensor)
    return Recipe(f"STORED[{name!r}]", tensor, stored=True)


def _text(reduced: Reduced, specimen: Specimen, recipes: Mapping[str, Recipe]) -> str:
    template = files(__package__) / "reproduce.py.template"
    stored = any(one.stored for one in recipes.values())
    inputs = [recipes[node.name].text for node in _inputs(specimen.module)]
    classes = "\n\n\n".join(_classes(specimen.module, "Minimal", recipes))
    given = "".join(f"    {text},\n" for text in inputs)
    dynamic = "None" if specimen.dims is None else _literal(specimen.dims)
    used = classes + given + dynamic
    owners = (package_of(type(one).__module__) for one in reduced.passes)
    versions = (*owners, f"enginecast {__version__}", f"torch {torch.__version__}")
    words = {
        "message": reduced.failure.message.splitlines()[0].replace("\\", "/").replace('"', "'"),
        "versions": ", ".join(dict.fromkeys(versions)),
        "pipeline": render([spec_from_pass(one) for one in reduced.passes]),
        "operator": "import operator\n" if "operator." in used else "",
        "path": "from pathlib import Path\n" if stored else "",
        "load": "from safetensors.torch import load_file\n" if stored else "",
        "dim": "from torch.export import Dim\n" if "Dim." in used else "",
        "stored": f'\nSTORED = load_file(Path(__file__).parent / "{TENSORS}")' if stored else "",
        "seeds": "".join(
            f"\n\n{inspect.getsource(one)}" for one in (normal, integers) if one.__name__ in used
        ),
        "classes": classes,
        "inputs": given,
        "dynamic": dynamic,
    }
    return Template(template.read_text(encoding="utf-8")).substitute(words)


def _classes(module: GraphModule, name: str, recipes: Mapping[str, Recipe]) -> list[str]:
    """The source of a module, after that of the blocks that its ops run."""
    before, own, body = [], [], []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            attribute = _attribute(node)
            held = module.get_submodule(node.target) if _is_block(module, node) else None
            if isinstance(held, GraphModule):
                inner = f"{name}{attribute.title().replace('_', '')}"
                before += _classes(held, inner, {})
                own.append(f"self.{attribute} = {inner}()")
            else:
                own.append(f'self.register_buffer("{attribute}", {_held(module, node, recipes)})')
            body.append(f"{node.name} = self.{attribute}")
        elif node.op == "call_function":
            body.append(f"{node.name} = {_call(node)}")
        elif node.op == "output":
            body.append(f"return {_literal(node.args[0])}")
    arguments = "".join(f", {node.name}" for node in _inputs(module))
    lines = [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in dict.fromkeys(own)),
        "",
        f"    def forward(self{arguments}):",
        *(f"        {line}" for line in body),
    ]
    return [*before, "\n".join(lines)]


def _held(module: GraphModule, node: Node, recipes: Mapping[str, Recipe]) -> str:
    target = str(node.target)
    return recipes[target].text if target in recipes else _kept(target, _tensor(module, node)).text


def _call(node: Node) -> str:
    target: Any = node.target
    values = [_literal(one) for one in node.args]
    values += [f"{key}={_literal(one)}" for key, one in node.kwargs.items()]
    if getattr(target, "__module__", "") == "_operator":
        return f"operator.{target.__name__}({', '.join(values)})"
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        return f"torch.ops.{space}.{name}.{target._overloadname}({', '.join(values)})"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}({', '.join(values)})"
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if module.partition(".")[0] in ("torch", "math"):
        return f"{module}.{name}({', '.join(values)})"
    raise UsageError(f"{node.format_node()}: the call of {target} cannot be written as Python")


def _literal(value: Any) -> str:
    """A value as Python source."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple):
        return f"({''.join(f'{_literal(one)}, ' for one in value).strip()})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_literal(one)}' for key, one in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_literal(value.start)}, {_literal(value.stop)}, {_literal(value.step)})"
    if value is torch.export.Dim.AUTO:
        return "Dim.AUTO"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)


def _inputs(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _weights(module: GraphModule) -> dict[str, Tensor]:
    nodes = [n for n in module.graph.find_nodes(op="get_attr") if not _is_block(module, n)]
    return {str(node.target): _tensor(module, node) for node in nodes}


def _is_block(module: GraphModule, node: Node) -> bool:
    return str(node.target) in dict(module.named_modules())


def _tensor(module: GraphModule, node: Node) -> Tensor:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor)
    return found.detach()


def _attribute(node: Node) -> str:
    return str(node.target).replace(".", "_")
