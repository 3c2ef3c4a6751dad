"""docs/extend/write-a-pass.md, followed as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_passes_new import environment

import enginecast.testing

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "write-a-pass.md"
BLOCK = re.compile(
    r"^```(?P<kind>\w*)(?P<title>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def test_the_names_in_the_table_are_public() -> None:
    named = re.findall(r"^\| `(\w+)\(", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(named) == 6
    assert set(named) <= set(enginecast.testing.__all__)
    assert all(getattr(enginecast.testing, name).__doc__ for name in enginecast.testing.__all__)


@pytest.mark.slow
def test_every_block_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    commands = {
        "enginecast": f'exec {python} -m enginecast "$@"',
        "pip": f'exec {sys.executable} -m pip --python {python} "$@"',
    }
    for name, command in commands.items():
        file = python.parent / name
        file.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        file.chmod(0o755)
    script = ["set -e"]
    for block in BLOCK.finditer(PAGE.read_text("utf-8")):
        if block["kind"] == "sh":
            script.append(block["text"])
        elif block["title"]:
            script.append(f"cat > model.py <<'EOF'\n{block['text']}EOF\n")
    wrong = "sed -i 's/found.node(\"x\"),)/found.root.args[1],)/' enginecast_fuse_silu/fuse_silu.py"
    script += [wrong, "enginecast opt model:make --pipeline fuse-silu --reduce"]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert "+%silu_default: f32[s0, 64] = aten.silu.default(%linear)  # model.py:12" in done.stdout
    assert "compared with the stored reference, run by onnxruntime-cpu" in done.stdout
    assert "reduced/reproduce.py: 2 of 4 nodes, and it fails in the same way" in done.stdout
