"""Write the smallest program as a script that stands alone: ops, seeded weights and inputs."""

import inspect
import re
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
from torch.fx import GraphModule

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
    failure, told = reduced.failure, shown.rpartition("fails: ")[2]
    named = (failure.kind, Path(failure.where).name) if failure.where else (failure.pass_name,)
    if done.returncode != FAILS or not all(name in told for name in named):
        raise UsageError(
            f"{folder / SCRIPT}: does not fail as the program does: {shown or done.stderr.strip()}",
            hint="The pass may depend on more than the program: run it with the model itself.",
        )
    return shown


def _seeded(reduced: Reduced) -> tuple[Specimen, dict[str, Recipe]]:
    """The specimen with seeded tensors wherever it fails with them, and how each is made."""
    specimen = reduced.specimen
    weights = specimen.weights()
    names = [*weights, *(node.name for node in specimen.placeholders)]
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
        text = repr(tensor.tolist())
        for name in ("nan", "inf"):
            text = re.sub(rf"\b{name}\b", f'float("{name}")', text)
        made = f"torch.tensor({text}, dtype={tensor.dtype}).reshape({tuple(tensor.shape)})"
        return Recipe(made, tensor)
    return Recipe(f"STORED[{name!r}]", tensor, stored=True)


def _text(reduced: Reduced, specimen: Specimen, recipes: Mapping[str, Recipe]) -> str:
    template = files(__package__) / "reproduce.py.template"
    stored = any(one.stored for one in recipes.values())
    imports: dict[str, Any] = {}
    classes = "\n\n\n".join(_classes(specimen.module, "Minimal", recipes, imports))
    given = "".join(f"    {recipes[node.name].text},\n" for node in specimen.placeholders)
    dynamic = "None"
    if specimen.dims is not None:
        dims = [", ".join(f"{dim}: Dim.AUTO" for dim in one) for one in specimen.dims]
        dynamic = f"[{', '.join(f'{{{one}}}' for one in dims)}]"
    used = classes + given
    owners = (package_of(type(one).__module__) for one in reduced.passes)
    versions = (*owners, f"enginecast {__version__}", f"torch {torch.__version__}")
    words = {
        "message": reduced.failure.message.splitlines()[0].replace("\\", "/").replace('"', "'"),
        "versions": ", ".join(dict.fromkeys(versions)),
        "pipeline": render([spec_from_pass(one) for one in reduced.passes]),
        "imports": "".join(
            sorted(
                _import(name, value)
                for name, value in imports.items()
                if re.search(rf"\b{name}\b", classes)
            )
        ),
        "path": "from pathlib import Path\n" if stored else "",
        "load": "from safetensors.torch import load_file\n" if stored else "",
        "dim": "from torch.export import Dim\n" if "Dim." in dynamic else "",
        "stored": f'\nSTORED = load_file(Path(__file__).parent / "{TENSORS}")' if stored else "",
        "seeds": "".join(
            f"\n\n{inspect.getsource(one)}" for one in (normal, integers) if one.__name__ in used
        ),
        "classes": classes,
        "inputs": given,
        "dynamic": dynamic,
    }
    return Template(template.read_text(encoding="utf-8")).substitute(words)


def _classes(
    module: GraphModule, name: str, recipes: Mapping[str, Recipe], imports: dict[str, Any]
) -> list[str]:
    """The source of a module, after that of the blocks that its ops run."""
    before, own = [], []
    for node in module.graph.find_nodes(op="get_attr"):
        attribute = str(node.target)
        held = getattr(module, attribute)
        if isinstance(held, GraphModule):
            inner = f"{name}{attribute.title().replace('_', '')}"
            before += _classes(held, inner, {}, imports)
            own.append(f"self.{attribute} = {inner}()")
        else:
            recipe = recipes.get(attribute) or _kept(attribute, held)
            own.append(f'self.register_buffer("{attribute}", {recipe.text})')
    code = module.graph.python_code("self")
    imports |= code.globals
    # torch.fx frees each value after its last use, which nobody reads.
    body = re.sub(r";  [\w =]+ = None$", "", code.src.strip(), flags=re.MULTILINE)
    lines = [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in dict.fromkeys(own)),
        "",
        *(f"    {line}" for line in body.splitlines() if line.strip()),
    ]
    return [*before, "\n".join(lines)]


def _import(name: str, value: Any) -> str:
    """The line that gives the code of torch.fx a name that it uses; empty: every script has it."""
    if name == "torch":
        return ""
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}\n"
    if isinstance(value, float):
        return f'{name} = float("{value}")\n'
    module, called = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return f"from {module} import {called} as {name}\n" if module and called else ""
