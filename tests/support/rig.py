"""T5 v1.1-like encoders with what trained T5 has and random weights lack: outliers beyond fp16.

In trained T5 encoders a few hidden units fire on particular tokens, and `wo` writes what they hold
to a few channels of the residual stream, which reaches 1.4e5 and more
(huggingface/transformers#10956, #5651).  `Rig` plants that in seeded weights:

* an outlier channel of the embedding, large for the end-of-text token;
* in one block, a hidden unit of the gated FFN that fires on it, with a product of `product`;
* a column of `wo` that takes it to two channels of the stream, `peak` high;
* in the next block, with `echo`, a unit that reads what else the first one wrote: its product is
  larger where the peak was cut, because the norm divides by the peak.

The final norm weighs those two channels down, as trained ones do: else they would be all that an
error could be measured on.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from models import VOCABULARY
from torch import Tensor
from transformers import T5Config, T5EncoderModel

EOS, UNIT = 1, 7
TRIGGER, ECHO, OUTLIERS = 11, 21, (3, 40)
FINAL = 0.004
"""Weight of the outliers in the final norm."""
BRANCHES = 2.0
"""How much more blocks write than random ones, of whatever kind: in trained encoders the stream is
what they wrote, not the embedding.  It decides what pure fp16 costs at 12 layers, because `wo` in
fp32 keeps the whole stream in fp32: 1.1 times the error with 2, 1.2 with 1, 1.35 with a half."""
SPILL = 0.4
"""How much of its random weights the column of `wo` keeps for the other channels."""


@dataclass(frozen=True)
class Sizes:
    """Of the encoder."""

    width: int = 64
    inner: int = 128
    """Of the feed-forward."""
    heads: int = 4
    head_size: int = 16
    vocabulary: int = VOCABULARY


BASE = Sizes(768, 2048, 12, 64, 32128)
"""T5 v1.1 base."""


@dataclass(frozen=True)
class Rig:
    """What a rig is made of."""

    layers: int = 4
    seed: int = 0
    product: float = 5.2e4
    """gate * linear of the hidden unit that fires; fp16 holds 65,504."""
    peak: float = 1.4e5
    """The largest value of the residual stream."""
    echo: float = 0.0
    """gate * linear of the unit in the next block; 0: there is none."""
    gated: bool = True
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def block(self) -> int:
        """Where the unit is."""
        return self.layers // 4

    def make(self) -> T5EncoderModel:
        """The encoder in fp32."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = T5EncoderModel(_config(self)).eval().requires_grad_(False)
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        self._plant(model)
        return model

    def save(self, folder: Path, dtype: torch.dtype = torch.float32, *, half: bool = False) -> Path:
        """Save it; another `dtype` goes through `from_pretrained`, as users do, so that float16
        keeps its `wo` in float32; `half` casts all of it.
        """
        self.make().save_pretrained(folder)
        if dtype != torch.float32:
            T5EncoderModel.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
        if half:
            T5EncoderModel.from_pretrained(folder).half().save_pretrained(folder)
        return folder

    def with_seed(self, seed: int) -> "Rig":
        return replace(self, seed=seed)

    def _plant(self, model: T5EncoderModel) -> None:
        for block in model.encoder.block:
            block.layer[0].SelfAttention.o.weight *= BRANCHES
            block.layer[1].DenseReluDense.wo.weight *= BRANCHES
        embedding = model.shared.weight
        for channel in (TRIGGER, ECHO):
            embedding[:, channel] = 0.0
            for block in model.encoder.block:
                block.layer[0].SelfAttention.o.weight[channel] = 0.0
                block.layer[1].DenseReluDense.wo.weight[channel] = 0.0
        embedding[EOS, TRIGGER] = 40.0
        unit = self._fire(model, self.block, TRIGGER, self.product)
        unit *= SPILL
        unit[ECHO] = self.peak / 10 / self.product
        unit[list(OUTLIERS)] = self.peak / self.product
        if self.echo:
            unit = self._fire(model, self.block + 1, ECHO, self.echo)
            unit.zero_()
            unit[list(OUTLIERS)] = 0.01
        model.encoder.final_layer_norm.weight[list(OUTLIERS)] = FINAL

    def _fire(self, model: T5EncoderModel, block: int, channel: int, product: float) -> Tensor:
        """Let a hidden unit of one block hold `product` on the end-of-text token; return what `wo`
        makes of it.
        """
        layer = model.encoder.block[block].layer[1]
        layer.layer_norm.weight[channel] = 1.0
        hidden = layer.DenseReluDense
        branches = (hidden.wi_0, hidden.wi_1) if self.gated else (hidden.wi,)
        read = self._read(model, block, channel)
        for branch in branches:
            branch.weight[UNIT] = 0.0
            branch.weight[UNIT, channel] = product ** (1 / len(branches)) / read
        column: Tensor = hidden.wo.weight[:, UNIT]
        return column

    def _read(self, model: T5EncoderModel, block: int, channel: int) -> float:
        """What the FFN of a block reads in a channel, on the end-of-text token."""
        found: list[float] = []
        feed_forward = model.encoder.block[block].layer[1].DenseReluDense
        hook = feed_forward.register_forward_pre_hook(
            lambda _, given: found.append(float(given[0][..., channel].max()))
        )
        with torch.no_grad():
            model(**prompts(1, seed=self.seed, vocabulary=self.sizes.vocabulary))
        hook.remove()
        return found[0]


CLAMPED = Rig()
"""`.half()` is finite and wrong: transformers clamps the infinities that `wo` gives."""
NOT_A_NUMBER = Rig(echo=3e4)
"""`.half()` is NaN: what the clamp cuts off lets a later product overflow, and infinity times zero
is not a number."""
BEYOND = Rig(product=8e4)
"""The product itself leaves fp16: NaN with `wo` in fp32, too."""


def prompts(
    count: int, *, tokens: int = 12, seed: int = 0, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    """Token ids and a ragged mask: every prompt ends in the end-of-text token, then padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocabulary, (count, tokens), generator=generator)
    lengths = torch.linspace(tokens, max(1, tokens // 3), count).long()
    places = torch.arange(tokens)[None]
    ids[torch.arange(count), lengths - 1] = EOS
    mask = (places < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def _config(rig: Rig) -> T5Config:
    sizes = rig.sizes
    return T5Config(
        vocab_size=sizes.vocabulary,
        d_model=sizes.width,
        d_kv=sizes.head_size,
        d_ff=sizes.inner,
        num_layers=rig.layers,
        num_heads=sizes.heads,
        feed_forward_proj="gated-gelu" if rig.gated else "relu",
        is_encoder_decoder=False,
        use_cache=False,
        architectures=["T5EncoderModel"],
    )
