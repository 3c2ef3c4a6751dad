"""TensorRT-RTX on the networks of the zoo and of vision: every model that ONNX Runtime's engine was
verified of, in a child of its own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Campaign, Ended
from vision import page as vision
from vision.run import CAMPAIGN as VISION
from zoo import table as zoo
from zoo.run import CAMPAIGN as ZOO

from trt_models.examine import Row, examine
from trt_models.page import PAGE, STORE, render

Item = tuple[str, str]
USED = (
    *(
        "bert",
        "roberta",
        "distilbert",
        "mpnet",
        "deberta-v2",
        "electra",
        "modernbert",
        "xlm-roberta",
    ),
    *("t5", "mt5", "umt5", "bart", "clip", "clip_text_model", "siglip", "siglip2", "vit", "dinov2"),
    *("swin", "convnext", "resnet", "segformer", "detr", "whisper", "wav2vec2", "llama", "mistral"),
    *("qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "mixtral"),
)
"""Types that are asked first."""


class Models(Campaign[Item, Row]):
    """A row for each model."""

    row, store, page = Row, STORE, PAGE
    seconds = 240
    memory = 16 << 30
    jobs = 1

    def items(self) -> Sequence[Item]:
        types = [name for name, row in zoo.read()["models"].items() if row["outcome"] == "verified"]
        types.sort(key=lambda name: USED.index(name) if name in USED else len(USED))
        images = [n for n, row in vision.read()["models"].items() if row["fp32"] == "verified"]
        first = [("zoo", name) for name in types if name in USED]
        rest = [("zoo", name) for name in types if name not in USED]
        return [*first, *(("vision", name) for name in images), *rest]

    def labels(self, item: Item) -> tuple[str, ...]:
        return item

    def lacks(self, item: Item) -> str:
        if not find_spec("tensorrt_rtx_bindings"):
            return "tensorrt-rtx is not installed"
        group, name = item
        return (ZOO if group == "zoo" else VISION).lacks(name)

    def prepare(self, folder: Path) -> None:
        ZOO.prepare(folder)
        VISION.prepare(folder)

    def examine(self, item: Item, folder: Path) -> Row:
        return examine(*item, folder)

    def ended(self, row: Row, child: Ended[Item]) -> None:
        row.seconds = round(child.seconds, 1)
        if child.status:
            row.answers = {
                precision: child.reason if "the process died" in said else said
                for precision, said in row.answers.items()
            }

    def said(self, row: Row) -> str:
        said = ", ".join(f"{precision} {answer}" for precision, answer in row.answers.items())
        return f"{row.group} {row.name}: {said} ({row.seconds} s)"

    def render(self, found: Mapping[str, Any]) -> str:
        return render(found, Counter(group for group, _ in self.items()))


CAMPAIGN = Models()
