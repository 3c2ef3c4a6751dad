"""What a version of torch or another library lacks costs that, and no import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layers import PROJECT, ROOT, sources

from enginecast import library_names

LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "diffusers")
PROJECT_NEEDS = [
    *PROJECT["project"]["dependencies"],
    *PROJECT["project"]["optional-dependencies"]["export"],
]
EVERYWHERE = {
    "torch._dispatch.python",
    "torch._ops",
    "torch._subclasses",
    "torch._subclasses.fake_tensor",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "torch.utils._sympy.functions",
    "torch.utils._sympy.numbers",
    "torch.utils._sympy.value_ranges",
}
"""Private modules without which nothing is captured at all."""
PLAIN = EVERYWHERE | {"torch._C", "torch._check", "torch._int_mm", "torch._scaled_mm"}
OPERATORS = ("torch.ops.aten", "torch.ops.higher_order")
WITHOUT = """
import pkgutil, sys
from importlib import import_module
import enginecast
from enginecast import library_names
from enginecast.library_names import MissingOperator

def lacking(self, name):
    return library_names._Overloads(f"aten.{name}", None)

library_names.Operators.__getattr__ = lacking
library_names.higher_order = MissingOperator
library_names.private_or_none = lambda name: None
for found in pkgutil.walk_packages(enginecast.__path__, "enginecast."):
    if found.name != "enginecast.__main__":
        import_module(found.name)
assert "enginecast.exporters.onnx.ops.linalg" in sys.modules
"""


@pytest.mark.parametrize(
    ("library", "called"),
    [("torch", "torch"), ("transformers", "transformers"), ("onnxruntime", "ONNX Runtime")],
)
def test_readme_names_the_versions_that_were_tested(library: str, called: str) -> None:
    [row] = re.findall(rf"^\| {called} \| (.+)$", (ROOT / "README.md").read_text("utf-8"), re.M)
    least, beyond = re.findall(r"\d+\.(\d+)", library_names.TESTED[library])
    minors = [int(minor) for minor in re.findall(r"\d+\.(\d+)", row)]
    assert (min(minors), max(minors) + 1) == (int(least), int(beyond))
    [wanted] = [one for one in PROJECT_NEEDS if one.startswith(f"{library}>=")]
    assert wanted == f"{library}{library_names.TESTED[library].partition(',')[0]}"


@pytest.mark.slow
def test_every_module_imports_where_torch_lacks_every_operator_and_private_name() -> None:
    """None of our tables, and none of our modules, needs one to be there."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _private_names(path: Path) -> Iterator[str]:
    """Operators and private names of libraries that a file looks up by itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):  # what it is an attribute of is a node of its own
            found = [ast.unparse(node)] if isinstance(node.ctx, ast.Load) else []
            has_private = _is_private(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module not in EVERYWHERE:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            has_private = any(map(_is_private, ".".join(found).split(".")))
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            has_private = any(map(_is_private, ".".join(found).split(".")))
        else:
            continue
        for name in found:
            is_private = has_private and name.partition(".")[0] in LIBRARIES
            if name in OPERATORS or (is_private and name not in PLAIN):
                yield f"{node.lineno}: {name}"


def test_operators_and_private_names_are_looked_up_in_one_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{name}"
        for _, path in sources()
        if path.name != "library_names.py"
        for name in _private_names(path)
    ]
    assert found == []
