"""fp16 graphs on ONNX Runtime's CPU provider: one that it crashes on, and what they take of memory;
in processes of their own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from enginecast.compiler.memory import STATM

CODE = """
import sys
import torch
import enginecast

class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])

torch.manual_seed(0)
example = {"x": torch.randn(2, 7, 32)}
bundle = enginecast.compile(Attend(), sys.argv[1], example=example, precision="fp16")
print(bundle.manifest.engines[0].verdict.outcome)
"""


@pytest.mark.slow
def test_multihead_attention_in_fp16_does_not_crash_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "verified-by-emulation"), done.stderr


GROW = """
import sys
import numpy as np
import torch
import enginecast
from enginecast.compiler.memory import anonymous

torch.manual_seed(0)
module = torch.nn.Sequential(*[torch.nn.Linear(3072, 3072) for _ in range(2)])
example = {"input": torch.randn(2, 3072)}
enginecast.compile(module, sys.argv[1], example=example, precision="fp16")
with enginecast.load(sys.argv[1], require="verified-by-emulation") as engine:
    before = anonymous()
    for batch in (2, 3, 5, 7, 11):
        engine.run({"input": np.ones((batch, 3072), np.float32)})
    print(anonymous() - before)
"""


@pytest.mark.skipif(not STATM.exists(), reason="the system has no /proc")
@pytest.mark.slow
def test_weights_that_were_cast_for_a_run_are_given_back(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", GROW, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cast_weights = 2 * 3072 * 3072 * 4
    assert int(done.stdout.splitlines()[-1]) < cast_weights / 2
