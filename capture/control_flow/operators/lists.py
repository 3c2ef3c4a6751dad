"""Lists that grow in a loop: one tensor with a row for each round stands for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from enginecast.errors import CaptureError


@dataclass(frozen=True)
class Appended:
    """A list while a loop that appends to it is traced."""

    before: list[Any]
    new: tuple[Any, ...] = ()
    """What the round that is traced has appended."""

    def append(self, value: Any) -> "Appended":
        return Appended(self.before, (*self.new, value))

    def settled(self) -> "Appended":
        """After a round that ran in Python."""
        return Appended([*self.before, *self.new])


class Row:
    """All rows; torch's functions meet it where they expect a list of tensors."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {"dim": 0, **(kwargs or {})}
        [row] = args[0]
        dim = args[1] if len(args) > 1 else named["dim"]
        rows: Tensor = row.rows
        if function is torch.stack:
            return rows.movedim(0, dim)
        if function in (torch.cat, torch.concat, torch.concatenate):
            dim = dim % (rows.dim() - 1)
            return rows.movedim(0, dim).flatten(dim, dim + 1)
        raise CaptureError(
            f"a list that grew in a loop over a dynamic size is given to {function.__name__}; "
            "only torch.stack and torch.cat are understood"
        )


class Rows(list[Any]):
    """The list after the loop: it can be stacked, concatenated, indexed and measured."""

    @classmethod
    def of(cls, before: Sequence[Any], stacked: Sequence[Tensor]) -> "Rows":
        [rows] = stacked
        if before:
            rows = torch.cat([torch.stack(list(before)), rows])
        return cls([Row(rows)])

    @property
    def _rows(self) -> Tensor:
        row = super().__getitem__(0)
        assert isinstance(row, Row)
        return row.rows

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def append(self, value: Any) -> None:
        raise CaptureError("a list that grew in a loop over a dynamic size grows again afterwards")

    extend = insert = append  # type: ignore[assignment]
