"""Which plans load: what is compared with the manifest, and what the real library says of a file
where there is no GPU.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bundles
import msgspec
import pytest
import torch

from enginecast.errors import BundleError, MissingError
from enginecast.runtime.bundle.manifest import Input, ShapeRange
from enginecast.runtime.sessions.tensorrt.lanes import LANES, Lanes
from enginecast.runtime.sessions.tensorrt.loaded_engine import (
    Tensor,
    _agreed,
    _require_profiles,
    load_engine,
    profiles_of,
)

DECLARED = [
    Input(name="x", kind="tensor", dtype="float32", shape=("batch", 4)),
    Input(name="mask", kind="attention_mask", dtype="bool", shape=("batch",)),
]
MASK = Tensor("mask", "mask", "bool", (-1,))
X = Tensor("x", "x", "float32", (-1, 4))
RANGE = {
    "x": ShapeRange(name="x", least=(1, 4), optimal=(2, 4), greatest=(3, 4)),
    "mask": ShapeRange(name="mask", least=(1,), optimal=(2,), greatest=(3,)),
}
BUILT = {"x": ((1, 4), (2, 4), (3, 4)), "mask": ((1,), (2,), (3,))}


def test_tensors_come_in_the_order_of_the_manifest() -> None:
    assert _agreed("engine.plan", "inputs", DECLARED, [MASK, X]) == (X, MASK)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (replace(X, dtype="float16"), "x float32 [batch, 4], the plan has float16 [?, 4]"),
        (replace(X, shape=(-1, 5)), "x float32 [batch, 4], the plan has float32 [?, 5]"),
        (replace(X, shape=(-1, 4, 1)), "x float32 [batch, 4], the plan has float32 [?, 4, 1]"),
        (replace(X, name="z"), "mask, x, the plan has mask, z"),
    ],
)
def test_tensors_that_are_not_the_manifest_s(found: Tensor, said: str) -> None:
    with pytest.raises(BundleError) as caught:
        _agreed("engine.plan", "inputs", DECLARED, [found, MASK])
    assert caught.value.message == f"engine.plan: inputs: the manifest says {said}"


@pytest.mark.parametrize(
    ("profiles", "built", "said"),
    [
        ([RANGE], [BUILT, BUILT], "the manifest says 1 profiles, the plan has 2"),
        ([], [BUILT, BUILT], "the manifest says 1 profiles, the plan has 2"),
        ([RANGE | {"z": RANGE["x"]}], [BUILT], "a profile of 'z', which is not an input"),
        (
            [RANGE, RANGE],
            [BUILT, BUILT | {"mask": ((1,), (2,), (4,))}],
            "input 'mask': the manifest says shapes [1] / [2] / [3] in profile 1, the plan was"
            " built for [1] / [2] / [4]",
        ),
    ],
)
def test_profiles_that_are_not_the_manifest_s(profiles: Any, built: Any, said: str) -> None:
    _require_profiles("engine.plan", [X, MASK], [RANGE, RANGE], [BUILT, BUILT])
    with pytest.raises(BundleError) as caught:
        _require_profiles("engine.plan", [X, MASK], profiles, built)
    assert said in caught.value.message


def test_a_record_has_its_profiles_by_number() -> None:
    ranges = tuple(
        msgspec.structs.replace(one, profile=n) for n in (0, 1) for one in RANGE.values()
    )
    found = profiles_of(bundles.engine(profile=ranges))
    assert [[*one] for one in found] == [["x", "mask"], ["x", "mask"]]
    assert found[1]["x"].profile == 1
    assert profiles_of(bundles.engine()) == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a plan loads where there is a GPU")
def test_the_library_says_why_it_does_not_load(tmp_path: Path) -> None:
    rtx = pytest.importorskip("rtx", reason="TensorRT-RTX has no wheel for this machine")
    made = rtx.lower(tmp_path)
    record: Any = bundles.engine(file=made.files[0], requires=made.requires)
    path, manifest = tmp_path / record.file, bundles.manifest()
    with pytest.raises(MissingError) as caught:
        load_engine(rtx.trt, path, record, manifest, None)
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith(
        f"engine.plan: TensorRT-RTX {rtx.trt.__version__} cannot load it here: Error reading CUDA"
    )
    assert "Ensure that the GPU driver is installed" in caught.value.message
    path.write_bytes(b"x" * 4096)
    with pytest.raises(BundleError, match="expected a plan of TensorRT-RTX, got another file"):
        load_engine(rtx.trt, path, record, manifest, None)


def test_lanes_are_each_used_by_one_thread_at_a_time() -> None:
    made: Any = Lanes(lambda: SimpleNamespace(owner=None, stream=0, inside=0), lambda _: False)  # type: ignore[arg-type,return-value]
    meet = threading.Barrier(2 * LANES)

    def work(_: int) -> set[int]:
        meet.wait()
        seen = set()
        for _ in range(50):
            with made.take() as lane:
                lane.inside += 1
                seen.add(lane.inside)
                lane.inside -= 1
        return seen

    with ThreadPoolExecutor(2 * LANES) as threads:
        assert set().union(*threads.map(work, range(2 * LANES))) == {1}
    assert 1 <= made.made <= LANES
