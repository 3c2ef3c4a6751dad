"""What is derived for each modality is what models take: tiny ones become verified engines."""

import json
from pathlib import Path

import torch
import transformers
from exports import make
from models import tiny_bert

import enginecast
from enginecast.capture.sources.open_source import open_source


def test_an_engine_takes_what_the_tokenizer_gives(tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path / "bert", layers=1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    done = make(str(folder), tmp_path / "bundle", "fp32")
    assert done.bundle is not None
    feeds = tokenizer(["a b", "c"], ["d", "e f g"], padding=True, return_tensors="pt")
    assert feeds["token_type_ids"].any()
    result = enginecast.load(done.bundle.root).run(feeds)["last_hidden_state"]
    eager = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = eager(**feeds).last_hidden_state
    torch.testing.assert_close(torch.from_numpy(result), expected)

    config = folder / "tokenizer_config.json"
    kept = json.loads(config.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}
    config.write_text(json.dumps(kept), encoding="utf-8")
    assert open_source(str(folder)).tokenized == ("input_ids", "attention_mask")
