"""Recorded calls of components: what is kept, which dimensions vary, what is refused."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.sources.calls.recording import Calls, record
from enginecast.errors import UsageError


@dataclass
class Conditions:
    text: Tensor
    scale: float = 1.0


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(4, 4)
        self.text = nn.Linear(6, 4)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        added: dict[str, Any] | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        conditions: Conditions | None = None,
        factor: float = 1.0,
        return_dict: bool = True,
    ) -> Any:
        found = self.inside(sample) * factor + timestep
        if added is not None:
            found = found + self.text(added["embeds"])[:, None] * len(added["sizes"])
        if rotary is not None:
            found = found * rotary[0] + rotary[1]
        if conditions is not None:
            found = found + self.text(conditions.text).mean(1, keepdim=True) * conditions.scale
        return {"sample": found} if return_dict else (found,)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def encode(self, x: Tensor) -> Tensor:
        return x[..., :4]

    def decode(self, z: Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        return (self.up(z),)

    def forward(self, x: Tensor) -> Any:
        return self.decode(self.encode(x))


class Pipe:
    """Calls its parts as a pipeline does."""

    def __init__(self) -> None:
        self.components = {
            "transformer": Denoiser().eval(),
            "vae": Decoder().eval(),
            "tokenizer": 1,
        }

    def __call__(self, size: int, rows: int = 2, steps: int = 2, **more: Any) -> Tensor:
        transformer, vae = self.components["transformer"], self.components["vae"]
        assert isinstance(transformer, Denoiser)
        assert isinstance(vae, Decoder)
        sample = torch.randn(rows, size * size, 4)
        given = {
            "added": {"embeds": torch.randn(rows, 6), "sizes": [size * 0, 1]},
            "rotary": (torch.randn(size * size, 1), torch.randn(size * size, 1)),
            "conditions": Conditions(torch.randn(rows, 3, 6), 0.5),
            **more,
        }
        for step in range(steps):
            (sample,) = transformer(sample, torch.tensor(step * 1.0), **given, return_dict=False)
        vae.decode(sample)
        return sample


def recorded(*sizes: int, **more: Any) -> tuple[Pipe, Calls]:
    pipe = Pipe()
    with record(pipe) as calls, torch.no_grad():
        for size in sizes:
            pipe(size, **more)
    return pipe, calls


def test_each_component_is_kept_with_its_inputs_by_name() -> None:
    pipe, calls = recorded(2, steps=3)
    assert list(calls) == ["transformer", "vae.decode"]
    found = calls["transformer"]
    assert {name: list(tensor.shape) for name, tensor in found.example.items()} == {
        "sample": [2, 4, 4],
        "timestep": [],
        "added_embeds": [2, 6],
        "rotary_0": [4, 1],
        "rotary_1": [4, 1],
        "conditions_text": [2, 3, 6],
    }
    assert [float(call["timestep"]) for call in found.calls] == [0, 1, 2]
    assert found.names == tuple(f"recorded call {n} of 3" for n in (1, 2, 3))
    assert found.dynamic() == []
    assert calls["vae.decode"].call.entry == "decode"
    assert "decode" not in vars(pipe.components["vae"])


@pytest.mark.parametrize("steps", [5, 28, 50, 1000])
def test_a_long_run_is_kept_early_in_the_middle_and_late(steps: int) -> None:
    class Step(nn.Module):
        def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
            return x + timestep

    model = Step()
    with record({"model": model}) as calls:
        for step in range(steps):
            model(torch.zeros(2, 3), torch.tensor(float(step)))
        model(torch.zeros(4, 3), torch.tensor(0.0))
        [series, _] = calls._heard["model"].values()
        assert len(series.some) <= 4  # memory does not grow with the run
    found = calls["model"]
    early, middle, late, larger = [float(call["timestep"]) for call in found.calls]
    assert (early, late, larger) == (0, steps - 1, 0)
    assert steps / 4 <= middle <= 3 * steps / 4
    assert found.names[-2:] == tuple(
        f"recorded call {n} of {steps + 1}" for n in (steps, steps + 1)
    )


def test_two_sizes_say_what_varies_and_hangs_together() -> None:
    _, calls = recorded(2, 4)
    found = calls["transformer"].dynamic()
    assert found == [f"{n}=sample_1:4..16/4" for n in ("sample:1", "rotary_0:0", "rotary_1:0")]
    assert calls["transformer"].dynamic(["rotary_0:0=4"]) == []


class TextReader(nn.Module):
    """Takes what Qwen-Image's transformer does of texts and sizes."""

    def forward(
        self,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        img_shapes: list[list[tuple[int, ...]]] | None = None,
    ) -> Tensor:
        return encoder_hidden_states


def test_a_mask_of_ones_that_is_left_out_and_the_number_of_rows_make_no_second_way() -> None:
    module = TextReader()
    with record({"transformer": module}) as calls:
        for rows, tokens in ((2, 7), (1, 5), (1, 0)):  # a text may be empty
            mask = torch.ones(rows, tokens, dtype=torch.int64) if rows > 1 else None
            module(torch.ones(rows, tokens, 3), mask, [[(1, 4, 4)]] * rows)
    found = calls["transformer"]
    assert found.call.constants == {"img_shapes": [[(1, 4, 4)]]}
    for call in found.calls:
        assert call["encoder_hidden_states_mask"].all()
        assert call["encoder_hidden_states_mask"].shape == call["encoder_hidden_states"].shape[:2]
    assert any("encoder_hidden_states:1=" in each for each in found.dynamic())


def test_calls_that_contradict_each_other_are_refused() -> None:
    pipe = Pipe()
    with record(pipe) as calls, torch.no_grad():
        pipe(2)
        pipe(2, factor=2.0)
    with pytest.raises(
        UsageError, match=r"transformer was called in two ways: factor is not given"
    ):
        calls["transformer"]
    with record(pipe) as calls, torch.no_grad():
        pipe(2)
        pipe(2, rotary=None)
    with pytest.raises(UsageError, match=r"rotary is \(the tensor\('rotary_0'\).* and not given"):
        calls["transformer"]
    with record(pipe) as calls, torch.no_grad():
        pipe(2)
        pipe(2, rotary=(torch.ones(1), torch.ones(1)))
    with pytest.raises(UsageError, match=r"rotary_0 is float32 \[4, 1\] and float32 \[1\]"):
        calls["transformer"]
