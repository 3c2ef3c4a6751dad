"""One way of training with a text encoder, in a process of its own: `cache_training` starts it.

    python benchmarks/cache_training_loop.py JOB.json

What is trained is a small transformer that reads the text by cross-attention, on random latents.
Prints one JSON object: seconds of each step, of which for the text, and of the CPU; the peak of the
process's memory as the kernel counts it, and how much of it the imports and the denoiser took.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, T5EncoderModel

WIDTH, LATENTS, LAYERS = 256, 64, 4
Batch = tuple[Tensor, Tensor]
"""Text [batch, sequence, width] and its mask [batch, sequence], not zero for rows to read."""


class Denoiser(nn.Module):
    """A stand-in: self-attention over latents, cross-attention to the text."""

    def __init__(self, text_width: int) -> None:
        super().__init__()
        self.text = nn.Linear(text_width, WIDTH)
        layers = [
            nn.TransformerDecoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, latents: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        memory = self.text(text)
        for layer in self.layers:
            latents = layer(latents, memory, memory_key_padding_mask=~mask)
        return latents


class Texts(Dataset[str]):
    """Captions as they are."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]


class Files(Dataset[tuple[Tensor, Tensor]]):
    """A file a text, as trainers write them: see `cache_training.write_files`."""

    def __init__(self, folder: Path, form: str, count: int, length: int) -> None:
        self.folder, self.form, self.count, self.length = folder, form, count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path = self.folder / f"{index}.{self.form}"
        if self.form == "npz":
            with np.load(path) as found:
                return torch.from_numpy(found["rows"]), torch.from_numpy(found["mask"]).bool()
        rows = torch.load(path)["rows"]
        made = rows.new_zeros((self.length, rows.shape[1]))
        made[: len(rows)] = rows
        return made, torch.arange(self.length) < len(rows)


def sources(job: dict[str, Any]) -> Callable[[], Iterator[Batch]]:
    """What gives the batches of an epoch."""
    texts, size, length = job["texts"], job["batch"], job["length"]
    order = torch.Generator().manual_seed(0)

    def loader(dataset: Any, **options: Any) -> Any:
        return DataLoader(dataset, size, shuffle=True, drop_last=True, generator=order, **options)

    if job["way"] in ("pt", "npz"):
        files = loader(Files(Path(job["files"]), job["way"], len(texts), length))
        return lambda: iter(files)
    if job["way"] == "dataset":
        from enginecast.cache.read.datasets import as_dataset, collate
        from enginecast.cache.read.reader import open_cache

        cache = open_cache(job["cache"])
        batches = loader(as_dataset(cache, texts), collate_fn=collate(cache.spec))
        return lambda: (
            (one["last_hidden_state"], _read(one["attention_mask"], job)) for one in batches
        )
    encode = encoder(job)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    captions = loader(Texts(texts), collate_fn=list)

    def encoded() -> Iterator[Batch]:
        for batch in captions:
            tokens = tokenizer(
                batch, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
            )
            mask = tokens.attention_mask
            given = {"attention_mask": mask} if job["mask"] else {}
            ids = tokens.input_ids.to(job["device"])
            with torch.no_grad():
                found = encode(ids, **{n: m.to(job["device"]) for n, m in given.items()})
            yield found.last_hidden_state, _read(mask, job)

    return encoded


def _read(mask: Tensor, job: dict[str, Any]) -> Tensor:
    """Rows that the denoiser reads: all of them where the encoder gets no mask."""
    return mask.bool() if job["mask"] else torch.ones_like(mask, dtype=torch.bool)


def encoder(job: dict[str, Any]) -> nn.Module:
    if job["way"] == "live":
        return T5EncoderModel.from_pretrained(job["model"]).eval().to(job["device"])
    from enginecast.cache.read.cached_encoder import CachedEncoder

    return CachedEncoder(job["cache"]).to(job["device"])


def peak() -> int:
    """Bytes.  Not `ru_maxrss`, which begins with that of the process that started this one."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def train(job: dict[str, Any]) -> dict[str, Any]:
    device = job["device"]
    torch.manual_seed(0)
    model = Denoiser(job["width"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = peak()
    epoch = sources(job)
    steps: list[float] = []
    waits: list[float] = []
    used: list[float] = []
    batches = epoch()
    while len(steps) < job["steps"]:
        begun, before_cpu = time.perf_counter(), time.process_time()
        found = next(batches, None)
        if found is None:
            batches = epoch()
            continue
        text, mask = (one.to(device) for one in found)
        waits.append(time.perf_counter() - begun)
        latents = torch.randn(len(text), LATENTS, WIDTH, device=device)
        loss = nn.functional.mse_loss(model(latents, text.float(), mask), latents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - begun)
        used.append(time.process_time() - before_cpu)
    cuda = {"cuda_peak": torch.cuda.max_memory_allocated()} if device == "cuda" else {}
    times = {"steps": steps, "waits": waits, "cpu": used}
    return times | {"before": before, "peak": peak(), **cuda}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
