"""An fp16 graph that ONNX Runtime 1.31's layout optimisers crash on; in a process of its own."""

import subprocess
import sys
from pathlib import Path

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


def test_multihead_attention_in_fp16_does_not_crash_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "verified-by-emulation"), done.stderr
