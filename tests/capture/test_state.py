"""State that a model keeps between calls is refused or reported, with its name and line."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control_flow import BufferCounter, KvCache, PythonCounter
from torch import Tensor, nn

import enginecast
from enginecast.capture.inputs.specs import from_example
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import capture
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.prepare.reference import reference_of
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError

X = torch.arange(12.0).reshape(3, 4) / 7


class Appends(nn.Module):
    """Keeps what it saw, and never looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1.0)  # HERE
        return x * 2


class Assigns(nn.Module):
    """Remembers a tensor of the last call, and adds it to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 if self.last is None else x * 2 + self.last.sum()
        self.last = x  # HERE
        return y


class Counts(nn.Module):
    """A counter that decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # HERE
        return x * 2


class Remembers(nn.Module):
    """As SeamlessM4T, which writes down which input it was given."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = "x"  # HERE
        return x + 1


class Parent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Overwrites(nn.Module):
    """A buffer that holds nothing from call to call."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table.copy_(x.amax(0).double())  # HERE
        return x * self.table


class ReadsFirst(Overwrites):
    """The same buffer, read before."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.table
        self.table.copy_(x.amax(0))  # HERE
        return y


def place(made: type) -> str:
    lines, first = inspect.getsourcelines(made)
    line = next(first + i for i, text in enumerate(lines) if "# HERE" in text)
    return f"{Path(str(inspect.getsourcefile(made))).name}:{line}"


def prepared_reference(module: nn.Module) -> list[str]:
    """Up to the reference, which calls eager twice; what it notes."""
    notes: list[str] = []
    source = FactorySource("model", module.eval(), {"x": X})
    made = prepare(source, ModelOptions(), Steps())
    reference_of(made, "fp32", notes)
    return [*made.captured.notes, *notes]


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch's; the command holds it back
@pytest.mark.parametrize(
    ("make", "name", "how"),
    [(PythonCounter, "calls", "was 0, is 3"), (Assigns, "last", "a tensor")],
)
def test_state_that_changes_the_result_is_refused(
    make: Callable[[], nn.Module], name: str, how: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        prepared_reference(Parent(make()))
    assert f"inner.{name} at " in caught.value.message
    assert f"{place(make)} ({how})" in caught.value.message  # type: ignore[arg-type]
    assert "another 'output_0'" in caught.value.message


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (Appends, "seen at {} (had 0 items, has 5)"),
        (Counts, "calls at {} (was 0, is 5)"),
        (Remembers, "given at {} (was not set, is 'x')"),
    ],
)
def test_state_that_decides_nothing_is_a_note(make: type[nn.Module], how: str) -> None:
    [note] = prepared_reference(make())
    name, reported = how.split(" at {} ")
    assert note.startswith(f"forward changes {name} at ")
    assert f"{place(make)} {reported}; an engine keeps no state" in note


def captured(module: nn.Module) -> tuple[str, ...]:
    example = {"x": X}
    if isinstance(module, KvCache):
        example |= {"position": torch.tensor([0, 1, 2])}
    specs = from_example(example)
    inputs = {
        spec.name: torch.zeros([d.size for d in spec.dims], dtype=spec.dtype) for spec in specs
    }
    return capture(FactorySource("model", module.eval(), {}), specs, inputs).notes


@pytest.mark.parametrize(
    ("make", "owner"), [(BufferCounter, "n"), (KvCache, "cache"), (ReadsFirst, "table")]
)
def test_a_write_to_a_buffer_is_refused_with_its_line(make: type[nn.Module], owner: str) -> None:
    with pytest.raises(CaptureError, match="writes to its own state") as caught:
        captured(make())
    assert f" changes {owner} at " in caught.value.message
    assert caught.value.message.endswith(place(make))


def test_a_buffer_that_is_overwritten_first_is_computed(tmp_path: Path) -> None:
    bundle = enginecast.compile(Overwrites(), tmp_path / "bundle", example={"x": X}, threads=1)
    with enginecast.load(bundle.root, threads=1) as engine:
        for factor in (1.0, -3.0):  # the second call must not see the first one's table
            found = engine.run({"x": (X * factor).numpy()})["output_0"]
            wanted = Overwrites()(X * factor).numpy()
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
    [note] = [note for note in captured(Overwrites()) if "overwrites" in note]
    assert place(Overwrites) in note
