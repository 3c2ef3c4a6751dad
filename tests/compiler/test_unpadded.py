"""A model that treats rows without padding in a way of its own, which a trace does not show."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest
from enginecast.runtime.load import load


class OwnPath(nn.Module):
    """Outside of a trace, a mask of ones is dropped, and with it what it did, as in AIMv2."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 12)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        if not torch.compiler.is_exporting() and bool(attention_mask.all()):
            return {"hidden": hidden.mean(1, keepdim=True) + hidden}
        causal = torch.cumsum(hidden * attention_mask.unsqueeze(-1), dim=1)
        return {"hidden": hidden + causal / (1 + causal.shape[1])}


class Listed(OwnPath):
    """Reads the mask in a way that no path of a program stands for."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.table(input_ids)
        if not torch.compiler.is_exporting() and 0 not in attention_mask.flatten().tolist():
            return {"hidden": hidden.mean(1, keepdim=True) + hidden}
        return {"hidden": hidden * attention_mask.unsqueeze(-1)}


@pytest.mark.slow
def test_it_is_rejected_where_no_trace_shows_it(tmp_path: Path) -> None:
    example = {
        "input_ids": torch.randint(0, 50, (3, 7)),
        "attention_mask": torch.ones(3, 7, dtype=torch.int64),
    }
    done = export(ExportRequest(Listed(), tmp_path / "bundle", precision="fp32", example=example))
    assert done.bundle is None
    named = [reason for reason in done.report.verdict.reasons if "'odd sizes'" in reason]
    assert any("the captured program is not the model" in reason for reason in named)


@pytest.mark.slow
def test_it_is_captured_as_eager_runs_it(tmp_path: Path) -> None:
    example = {
        "input_ids": torch.randint(0, 50, (3, 7)),
        "attention_mask": torch.ones(3, 7, dtype=torch.int64),
    }
    model = OwnPath()
    done = export(ExportRequest(model, tmp_path / "bundle", precision="fp32", example=example))
    assert done.bundle is not None
    with load(done.folder) as engine:
        for mask in (torch.ones(2, 5, dtype=torch.int64), torch.tensor([[1, 1, 1, 0, 0]] * 2)):
            feeds = {"input_ids": torch.randint(0, 50, (2, 5)), "attention_mask": mask}
            given = torch.as_tensor(engine(**feeds)["hidden"])
            torch.testing.assert_close(given, model(**feeds)["hidden"])
