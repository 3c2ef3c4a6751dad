"""Nothing of a bundle or a cache is unpickled: the sources are searched, and a load is watched."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bundles
import pytest

ROOT = Path(__file__).parents[2]
READERS = ("runtime", "cache", "enginecast/pipelines")
BETWEEN_OWN_PROCESSES = {"cache/fill/ray.py: pickle"}
"""What a fill and its workers send one another; nothing of it is kept in a file."""
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def _found(source: str) -> Iterator[str]:
    """What could unpickle: imports, torch.load that is not weights_only, numpy's allow_pickle."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    words = {one.arg: ast.unparse(one.value) for one in node.keywords if one.arg}
    if words.get("allow_pickle", "False") != "False" or words.get("weights_only") == "False":
        yield ast.unparse(node)
    if ast.unparse(node.func) == "torch.load" and words.get("weights_only") != "True":
        yield ast.unparse(node)
    if ast.unparse(node.func) in ("torch.export.load", "export.load"):
        yield ast.unparse(node)


def test_no_reader_can_unpickle() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {what}"
        for folder in READERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for what in _found(path.read_text(encoding="utf-8"))
    }
    assert found == BETWEEN_OWN_PROCESSES


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "torch.export.load(path)",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert [*_found(source)]


WATCHED = """
import sys
seen = []
def hook(event, arguments):
    if event == "pickle.find_class":
        seen.append((event, arguments))
sys.addaudithook(hook)
import pickle
import bundles
from enginecast.runtime.load import load
from enginecast.runtime.prompts import encode_prompts
import enginecast.runtime.sessions.onnxruntime
with load(sys.argv[1]) as engine:
    engine.run(bundles.feeds())
    encode_prompts(engine.folder, engine.manifest, ["red fox"])
assert not seen, seen
pickle.loads(pickle.dumps(bundles.verdict))
assert seen  # the hook works
"""


def test_a_load_unpickles_nothing(tmp_path: Path) -> None:
    root = bundles.make_bundle(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(root)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
