"""A program lowered to a plan and run from a bundle, with the fake of TensorRT and a CPU stand-in.

What the exporter writes down is what the session asks for; nothing of it is about TensorRT.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_bundles as small
import torch
from cpu_stand_in import use_stand_in
from tensorrt_orders import FEATURES, make_rig, order_of, program

from enginecast.errors import BundleError
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.exporters.tensorrt.lower import lower_to_tensorrt
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.exporters.tensorrt.profiles import profile_of
from enginecast.runtime.bundle.manifest import Output
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.tensorrt.session import TensorRTSession


def published(target: Path, order: LoweringRequest, lowered: Artifact) -> Path:
    files = {name: (order.folder / name).read_bytes() for name in lowered.files}
    record = small.record(
        requires=dict(lowered.requires),
        **lowered.record,
        weights=next((name for name in files if name.endswith(".safetensors")), None),
    )
    content = small.manifest(
        record,
        inputs=tuple(order.inputs),
        symbols=dict(order.ranges),
        outputs=(Output(name="out", dtype="float32", shape=("batch", 5)),),
    )
    return small.publish(target, files, content)


def opened(root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    rig = make_rig(monkeypatch, root, "11.0.0.114+fake")
    order = rig.order(**options)
    target = published(root / "out", order, lower_to_tensorrt(order))
    use_stand_in(monkeypatch)
    return load(target, device="cuda", allow_code=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strip_weights": True},
        {"refit": True},
        {"version_compatible": True, "hardware": "ampere+"},
    ],
    ids=["plain", "stripped", "refittable", "compatible"],
)
def test_the_engine_computes_what_the_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    module = program()[0]
    with opened(tmp_path, monkeypatch, **options) as engine:
        for batch in (1, 8, 3):
            x = torch.randn(batch, FEATURES)
            with torch.no_grad():
                wanted = module(x).numpy()
            found = engine.run({"x": x.numpy()})["out"]
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        session = engine._session
        assert isinstance(session, TensorRTSession)
        layers = session.inspect()
        assert layers.detailed
        assert layers.output_dtypes.keys() == {"fp32"}


def test_a_plan_of_other_ranges_than_the_manifest_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(monkeypatch, tmp_path, "11.0.0.114+fake")
    order = rig.order()
    lowered = lower_to_tensorrt(order)
    other = order_of(tmp_path / "other", TensorRTOptions(optimal={"x": (2, FEATURES)}))
    profile = profile_of(other.inputs, other.ranges, other.options)
    changed = replace(lowered, record={**lowered.record, "profile": profile})
    use_stand_in(monkeypatch)
    target = published(tmp_path / "out", order, changed)
    with pytest.raises(BundleError, match=r"says shapes \[1, 24\] / \[2, 24\] / \[8, 24\], the"):
        load(target, device="cuda", allow_code=True)
