"""`make demo`, as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_demo_verifies_three_precisions_refuses_a_conversion_and_runs_without_torch(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reported = done.stdout.replace("\n", " ")
    assert "fp16-naive: fp16 cannot hold this model: values leave fp16's range at enc" in reported
    assert "torch imported: False" in done.stdout
    made = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"fp32", "bf16", "fp16", "fp16-naive.rejected", "out.safetensors"} <= made
    assert "fp16-naive" not in made
