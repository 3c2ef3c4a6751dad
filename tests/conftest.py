"""Every test starts from a seed of its own and leaves torch's global switches as it found them."""

import contextlib
import functools
import gc
import os
import random
import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from exports import Exports

# Tests never reach for the hub, wherever they run.
os.environ["HF_HUB_OFFLINE"] = "1"
# As in enginecast/__main__.py: torch's idle threads must not take the time of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each use every core ran half as fast as with a thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

COLLECTED = (10_000, 10, 100)
"""Objects that are made before the garbage collector looks, and how rarely it looks at all."""
SWEPT = {"WALKED": 600, "MOST": 8}
"""How far the sweep over a model's sizes goes where a test is not about sizes: for users it goes
farther, and takes a third of an export.
"""
SLOW_SECONDS = 900
"""Timeout of a slow test without one of its own: the exports of a pipeline took longer on a busy
machine than what pyproject.toml gives a test.
"""
LONGEST = ("test_wheel.py", "test_aotinductor.py", "test_cli.py")
"""Files that take a minute: begun first, so that no worker is left alone with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep xdist from giving out files by how many tests they have."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and give slow tests more time."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking often.

    Not `gc.freeze`: it hides what was imported from `gc.get_referrers`, by which
    `enginecast.capture.control_flow.cover.branches` finds the functions of a model.
    """
    gc.set_threshold(*COLLECTED)


@functools.cache
def swept(sweep: Any) -> dict[str, int]:
    """How far a sweep goes for users."""
    return {name: getattr(sweep, name) for name in SWEPT}


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test, which export
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sweep fewer sizes, but where a test is about them."""
    if sweep := sys.modules.get("enginecast.capture.tracing.sizes.sweep"):
        vars(sweep).update(swept(sweep))
        if not item.get_closest_marker("all_sizes"):
            vars(sweep).update(SWEPT)


@functools.cache
def share_registry(registration: Any) -> None:
    """Let torch.onnx make its table of functions once, not for each program: it takes 0.3 s."""
    registry = registration.ONNXRegistry
    made = functools.cache(registry.from_torchlib)

    def copied(**options: Any) -> Any:
        copy, known = registry(), made(**options)
        copy._opset_version = known._opset_version
        copy.functions = {op: list(forms) for op, forms in known.functions.items()}
        return copy

    registry.from_torchlib = staticmethod(copied)


@functools.cache
def share_decompositions(tables: Any) -> None:
    """Let torch.onnx collect once, not for each program, what it decomposes: it takes 0.06 s.  It
    depends on the operators that there are.
    """
    make = tables.create_onnx_friendly_decomposition_table
    made: dict[Any, Any] = {}

    def shared(implemented: Any) -> Any:
        torch = tables.torch
        composite = torch._C._dispatch_get_registrations_for_dispatch_key(
            "CompositeImplicitAutograd"
        )
        decomposed = torch._decomp.decomposition_table
        key = frozenset(implemented), frozenset(composite), frozenset(decomposed.items())
        if key not in made:
            made[key] = make(implemented)
        return dict(made[key])

    tables.create_onnx_friendly_decomposition_table = shared


@pytest.fixture(scope="session", autouse=True)
def doctor_imports_one_library() -> Iterator[None]:
    """All take ten seconds; commands in processes of their own import all."""
    from enginecast.doctor import imports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imports, "LIBRARIES", imports.LIBRARIES[:1])
        yield


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed from the test's name, so that a test does not depend on which ran before it."""
    seed = zlib.crc32(request.node.name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    if registration := sys.modules.get("torch.onnx._internal.exporter._registration"):
        share_registry(registration)
        share_decompositions(sys.modules["torch.onnx._internal.exporter._decomp"])
    torch.manual_seed(seed)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    if "torch._dynamo" in sys.modules:
        # What one test compiled must not count against the recompile limit of the next; a failure
        # to tidy up says nothing about the test.
        with contextlib.suppress(Exception):
            sys.modules["torch._dynamo"].reset()


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> "Exports":
    """Exports that test files share: one takes seconds."""
    from exports import Exports  # imports torch, which most test files do without

    root = tmp_path_factory.getbasetemp()
    shared = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared-exports"
    shared.mkdir(exist_ok=True)
    return Exports(tmp_path_factory.mktemp("exports"), shared)
