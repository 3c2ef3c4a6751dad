"""Rows that the table leaves out because of a mask: no transformer reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from denoisers import BATCH, DENOISERS, LENGTH, REAL, WIDTH
from torch import Tensor

from enginecast.cache.encoders.request import part_of


def denoised(make: Callable[[Tensor, Tensor], Any], text: Tensor) -> Tensor:
    mask = (torch.arange(LENGTH) < REAL).long().expand(BATCH, -1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model, given = make(text, mask)
        for parameter in model.parameters():  # some begin as zeros, behind which nothing shows
            torch.nn.init.normal_(parameter, std=0.3)
        found = model.eval()(**given, return_dict=False)[0]
    assert isinstance(found, Tensor)
    return found


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed`:FutureWarning")  # Chroma's own import
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi asks for fp32
@pytest.mark.parametrize("pipeline", DENOISERS)
def test_rows_that_a_mask_leaves_out_are_not_read_where_the_table_trims(pipeline: str) -> None:
    make = DENOISERS[pipeline]
    text = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    padding, token = text.clone(), text.clone()
    padding[:, REAL:] = 0
    token[:, REAL - 1] += 1
    reference = denoised(make, text)
    assert reference.isfinite().all()
    assert not torch.equal(denoised(make, token), reference)
    ignored = torch.equal(denoised(make, padding), reference)
    assert ignored is not part_of(f"{pipeline}:text_encoder").keep_all
