"""A lack of memory is neither a defect of enginecast nor a fault of a text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fill_fixtures import TableEncoder, spec

from enginecast.cache.encoders.open_encoder import Encoder
from enginecast.cache.encoders.text_model import ModelFacts
from enginecast.cache.fill.local import encode_batch
from enginecast.cache.fill.schedule import Wanted
from enginecast.errors import MissingError
from enginecast.runtime.device.out_of_memory import lacks_memory


class LargeModel:
    """A model that allocates more than any machine has."""

    def __init__(self, library: Any) -> None:
        self._library = library

        self.facts = ModelFacts(
            about=TableEncoder().about,
            folder=None,  # type: ignore[arg-type]
            identity={},
            precision="fp32",
            takes_mask=True,
            sequence=(1, None),
            default_length=8,
            vocabulary=None,
            padding_id=0,
        )

    def outputs(self, names: Sequence[str]) -> Any:
        raise AssertionError

    def run(self, ids: Any, mask: Any, outputs: Sequence[str]) -> dict[str, Any]:
        return {"last_hidden_state": self._library.empty(1 << 55)}

    def close(self) -> None: ...


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_a_batch_that_does_not_fit(library: Any) -> None:
    encoder = Encoder(LargeModel(library), spec(), b"{}")
    wanted = [Wanted(bytes([n]) * 16, f"w{n}", np.array([n, 1], np.int32)) for n in range(2, 5)]
    with pytest.raises(MissingError, match="too little memory for 3 texts of 2 tokens") as caught:
        encode_batch(encoder, wanted)
    assert "--batch-tokens" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("Failed to allocate memory for requested buffer of size 4096"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("expected scalar type Float but found Half"), False),
        (ValueError("no such memory format"), False),
    ],
)
def test_what_means_a_lack_of_memory(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) == lacks
