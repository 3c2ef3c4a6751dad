"""A program of one path only: right where its guards hold, and refused everywhere else."""

from pathlib import Path

import numpy as np
import pytest
import torch
from control_flow import ROWS
from torch import Tensor, nn

from enginecast.api import compile as export
from enginecast.capture.tracing.attempt import RefusedError
from enginecast.compiler.request import ModelOptions
from enginecast.errors import InputError
from enginecast.runtime.load import load

pytestmark = pytest.mark.all_sizes

SPECIALISE = ModelOptions(fallback="specialise")


class Stages(nn.Module):
    """Two predicates on inputs and one on weights, each of another kind of read."""

    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(1.0))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        if self.limit > 0:
            x = x * 2
        try:  # keeps every rewriter away
            if x.sum() > 0:
                x = x + 1
        finally:
            pass
        for _ in range(int(n)):
            x = x * 3
        return x


def feeds(rows: int, sign: float, n: int) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 4), sign, np.float32), "n": np.array(n)}


def test_inputs_of_another_path_are_refused(tmp_path: Path) -> None:
    example = {"x": torch.ones(3, 4), "n": torch.tensor(2)}
    bundle = export(Stages(), tmp_path / "out", example=example, options=SPECIALISE)
    manifest = bundle.manifest
    assert [rung.name for rung in manifest.capture][-1] == "specialise"
    assert [output.name for output in manifest.outputs] == ["output_0"]
    assert [guard.value for guard in manifest.guards] == ["True", "2"]  # not that on weights
    assert all("test_specialise.py:" in guard.place for guard in manifest.guards)
    [lacking] = [each for each in manifest.downgrades if each.kind == "branch"]
    assert (lacking.option, lacking.consent) == ("--fallback specialise", "given")
    with load(bundle.root) as engine:
        for rows in (1, 3, 7):
            outputs = engine.run(feeds(rows, 1.0, 2))
            assert outputs.keys() == {"output_0"}
            np.testing.assert_allclose(outputs["output_0"], np.full((rows, 4), 27.0))
        with pytest.raises(InputError, match=r"(?s)another path.*expected True at .*x.sum\(\) > 0"):
            engine.run(feeds(3, -1.0, 2))


def test_it_is_done_only_when_asked_for(tmp_path: Path) -> None:
    example = {"x": torch.ones(3, 4), "n": torch.tensor(2)}
    with pytest.raises(RefusedError) as caught:
        export(
            Stages(), tmp_path / "out", example=example, options=ModelOptions(fallback="rewrite")
        )
    assert "specialise" not in [rung.name for rung in caught.value.rungs]
    assert not (tmp_path / "out").exists()


def test_values_that_are_read_are_guarded(tmp_path: Path) -> None:
    [row] = [row for row in ROWS if row.name == "TryValue"]
    bundle = export(row.module(), tmp_path / "out", example=row.a(), options=SPECIALISE)
    assert [guard.value for guard in bundle.manifest.guards] == ["1"]
    inside, outside = (
        {name: tensor.numpy() for name, tensor in inputs.items()} for inputs in (row.a(), row.b())
    )
    with load(bundle.root) as engine:
        expected = row.module()(**row.a()).numpy()
        np.testing.assert_allclose(engine.run(inside)["output_0"], expected, rtol=1e-6)
        with pytest.raises(InputError, match="expected 1 at"):
            engine.run(outside)
