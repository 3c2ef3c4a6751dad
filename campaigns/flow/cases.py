"""What is examined: groups of models, each with an example and a second input."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import sapiens_shape
import torch
from control_flow import ROWS, Row
from db_examples import DbExample, db_example, db_names
from torch import Tensor, nn

from flow.hf_models import HF_MODELS, MIXTURES, Make

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """What an export is asked to do, and on what its bundle is judged."""

    model: str | nn.Module
    """A folder, or a module with its example."""
    example: Inputs = field(default_factory=dict)
    others: tuple[Inputs, ...] = ()
    """Inputs that the export does not see: other values, another branch, another size."""
    dynamic: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    group: str
    name: str
    make: Callable[[Path], Model]
    """Makes the model; may write into the folder."""
    precision: str = "fp32"
    place: Callable[[], str] = str
    """`file.py:line` that a refusal must name; empty: not known beforehand."""


def cases() -> Iterator[Case]:
    """All of them, group by group."""
    for name in db_names():
        yield Case("db", name, partial(_db, name))
    for row in ROWS:
        yield Case("fixtures", row.name, partial(_fixture, row), place=partial(_place, row))
    for name, make in HF_MODELS.items():
        yield Case("models", name, partial(_folder, make))
    for precision in ("fp32", "bf16"):
        yield Case("models", f"Sapiens-shaped {precision}", _segmenter, precision)
    for name, make in MIXTURES.items():
        for precision in ("fp32", "fp16", "bf16"):
            yield Case("mixtures", f"{name} {precision}", partial(_folder, make), precision)


def _db(name: str, folder: Path) -> Model:
    found: DbExample = db_example(name, folder)
    other = {name: _changed(tensor) for name, tensor in found.inputs.items()}
    return Model(found.module, found.inputs, (other,), found.dynamic)


def _changed(tensor: Tensor) -> Tensor:
    """Other values of the same kind: signs turn, switches flip, counts go down by one."""
    if tensor.is_floating_point():
        return 0.3 - 0.7 * tensor
    return ~tensor if tensor.dtype == torch.bool else (tensor - 1).clamp(min=0)


def _fixture(row: Row, _: Path) -> Model:
    return Model(row.module(), row.a(), (row.b(),))


def _place(row: Row) -> str:
    return f"{Path(row.file).name}:{row.line}" if row.line else ""


def _folder(make: Make, folder: Path) -> Model:
    return Model(str(make(folder / "model")))


def _segmenter(_: Path) -> Model:
    module, example = sapiens_shape.make()
    others = (sapiens_shape.example(30, 11), sapiens_shape.example(32, 24, batch=5))
    return Model(module, example, others)
