"""A tiny T5 encoder to try things on: `python examples/tiny_t5.py` writes t5/ and prompts.txt.

Four layers of random, seeded weights, and a tokenizer.  Like trained T5 encoders, it drives two
channels of the residual stream past fp16's largest value; nothing else about it is like a trained
model.  What is there already stays as it is.
"""

import json
import sys
from filecmp import cmpfiles
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import T5Config, T5EncoderModel
from transformers.utils import logging

TEXTS = (
    "a red fox in the snow",
    "two cats sleep on a sofa while it rains",
    "rain",
    "an oil painting of a lighthouse at night, a storm rising",
)
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",  # or transformers builds T5's own, of other ids
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
EOS, TRIGGER, HIDDEN, CHANNELS = 1, 11, 7, (3, 40)


def main() -> None:
    """Write the model and the prompts into the current folder."""
    logging.disable_progress_bar()
    with TemporaryDirectory() as made:
        make_model().save_pretrained(made)
        make_tokenizer().save(f"{made}/tokenizer.json")
        Path(made, "tokenizer_config.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
        names = [file.name for file in Path(made).iterdir()]
        if Path("t5").exists() and cmpfiles(made, "t5", names, shallow=False)[0] != names:
            sys.exit("t5 is here already, and is another model: run this in another folder")
        copytree(made, "t5", dirs_exist_ok=True)
    prompts, text = Path("prompts.txt"), "\n".join(TEXTS) + "\n"
    if prompts.exists() and prompts.read_text(encoding="utf-8") != text:
        print("wrote t5; prompts.txt is here already, and stays as it is")
        return
    prompts.write_text(text, encoding="utf-8")
    print("wrote t5 and prompts.txt")


def make_model() -> T5EncoderModel:
    """The encoder, whose hidden unit writes 1.4e5 to two channels at the end of a text."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=4,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        architectures=["T5EncoderModel"],
    )
    model = T5EncoderModel(config).eval().requires_grad_(False)
    state = dict(model.named_parameters())
    for name, weight in state.items():
        if name.endswith("norm.weight"):
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    state["shared.weight"][:, TRIGGER] = 0.0
    state["shared.weight"][EOS, TRIGGER] = 40.0
    block = "encoder.block.2.layer.1."
    state[block + "layer_norm.weight"][TRIGGER] = 1.0
    for name in ("wi_0", "wi_1"):
        state[f"{block}DenseReluDense.{name}.weight"][HIDDEN, TRIGGER] = 8.0
    for channel in CHANNELS:
        state[block + "DenseReluDense.wo.weight"][channel, HIDDEN] = 40.0
    return model


def make_tokenizer() -> Tokenizer:
    """Trained on the prompts; every text ends with </s>, as T5's do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    return tokenizer


if __name__ == "__main__":
    main()
