"""Exports for trainers: read back as each trainer's documentation and code say that it reads them.

The readers here know the trainers, and nothing of how the files were written; what they read is
compared with the live encoders, called as the trainers call theirs.
"""

import errno
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cached_pipelines import OWN_SIDE, PIPELINES, Workshop, prompts_of, side_of
from exports import Exports, cast
from language_models import ChatTokenizer
from safetensors import safe_open
from torch import Tensor

from enginecast.cache.encoders.request import part_of
from enginecast.cache.read.reader import open_cache
from enginecast.cache.store.folders import open_store
from enginecast.cache.upkeep.exporting import write_arrays
from enginecast.cache.upkeep.trainers import plan_export, table
from enginecast.errors import EnginecastError, MissingError

Out = pytest.CaptureFixture[str]
FILES = ("fox.png", "shots/a.b.jpg", "shots/x_y.webp", "c.mp4", "d", "e.png", "f.png")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, exports: Exports) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"), exports)


@dataclass(frozen=True)
class Seen:
    """What a live encoder makes of a text, as a trainer calls it: one row, no batch."""

    ids: Tensor
    mask: Tensor
    states: tuple[Tensor, ...]
    last: Tensor
    pooled: Tensor | None
    embeds: Tensor | None

    @property
    def real(self) -> Tensor:
        return self.mask.bool()


def see(
    workshop: Workshop,
    model: str,
    text: str,
    length: int,
    *,
    masked: bool = True,
    end: str = "",
    special: bool = True,
    **tokenizer: Any,
) -> Seen:
    """Run an encoder on a text that is padded and cut to a length, and on an `end` behind that."""
    if model not in OWN_SIDE:
        tokenizer = {"padding_side": side_of(model), **tokenizer}
    made = ChatTokenizer.from_pretrained(workshop.model(model), **tokenizer)
    call = partial(made, add_special_tokens=special, return_tensors="pt")
    behind = call(end)
    length -= behind.input_ids.shape[1] if end else 0
    row = call(text, padding="max_length", truncation=True, max_length=length)
    ids, mask = row.input_ids, row.attention_mask
    if end:
        ids, mask = (
            torch.cat([ids, behind.input_ids], 1),
            torch.cat([mask, behind.attention_mask], 1),
        )
    given = {"attention_mask": mask} if masked else {}
    if end:  # transformers 4.57, which musubi-tuner pins, counts positions by the mask
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0).expand(3, -1, -1)
    with torch.no_grad():
        out = workshop.encoder(model)(input_ids=ids, output_hidden_states=True, **given)
    rest = (out.get(name) for name in ("pooler_output", "text_embeds"))
    return Seen(
        ids[0],
        mask[0],
        tuple(one[0] for one in out.hidden_states),
        out.get("last_hidden_state", out.hidden_states[-1])[0],
        *(None if one is None else one[0] for one in rest),
    )


def padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


See = Callable[..., Seen]
Wanted = dict[str, Tensor | None]


def wan(see: See, text: str) -> Wanted:
    seen = see("umt5", re.sub(r"\s+", " ", text).strip(), 512)
    return {"t5": seen.last[seen.real]}


def llama(see: See, text: str) -> Seen:
    template = part_of("hunyuan-video:text_encoder").template
    return see("llama", template.format(text), 256 + 95)


def hunyuan_video(see: See, text: str) -> Wanted:
    seen, clip = llama(see, text), see("clip", text, 77)
    rows = seen.states[-3][95:][seen.mask[95:].bool()]
    return {
        "llm": padded(rows, 256),
        "llm_mask": seen.mask[95:],
        "clipL": clip.pooled,
        "clipL_mask": clip.mask,
    }


def framepack(see: See, text: str) -> Wanted:
    seen = llama(see, text)
    rows = seen.states[-3][95 : int(seen.mask.sum())]
    return {
        "llama_vec": padded(rows, 512),
        "llama_attention_mask": padded(torch.ones(len(rows)), 512).bool(),
        "clip_l_pooler": see("clip", text, 77).pooled,
    }


def kontext(see: See, text: str) -> Wanted:
    pooled = see("clip", text, 77, masked=False).pooled
    return {"t5_vec": see("t5", text, 512, masked=False).last, "clip_l_pooler": pooled}


def flux2(see: See, text: str, model: str, layers: tuple[int, ...], special: bool) -> Wanted:
    seen = see(model, part_of(model).template.format(text), 512, special=special)
    return {"ctx_vec": torch.cat([seen.states[layer] for layer in layers], -1)}


def qwen_image(see: See, text: str) -> Wanted:
    seen = see("qwen-image", part_of("qwen-image").template.format(text), 1024 + 34)
    return {"vl_embed": seen.states[-1][seen.real][34:]}


def z_image(see: See, text: str) -> Wanted:
    seen = see("qwen3", part_of("z-image").template.format(text), 512)
    return {"llm_embed": seen.states[-2][seen.real]}


def krea2(see: See, text: str) -> Wanted:
    before, end = part_of("krea2").template.split("{}")
    seen = see("krea2", before + text, 512 + 34, end=end)
    layers = torch.stack([seen.states[layer] for layer in range(2, 36, 3)], 1)
    return {"krea2_vl_embed": layers[34:][seen.mask[34:].bool()]}


MUSUBI: Mapping[str, tuple[str, str, str, Callable[[See, str], Wanted]]] = {
    "wan": ("wan", "wan", "wan", wan),
    "hunyuan-video": ("hunyuan-video", "hv", "hunyuan_video", hunyuan_video),
    "framepack": ("hunyuan-video", "fp", "framepack", framepack),
    "flux-kontext": ("flux", "fk", "flux_kontext", kontext),
    "flux2-dev": (
        *("flux2", "f2d", "flux_2_dev"),
        partial(flux2, model="flux2", layers=(10, 20, 30), special=False),
    ),
    "flux2-klein-4b": (
        *("flux2-klein", "f2k4b", "flux_2_klein_4b"),
        partial(flux2, model="flux2-klein", layers=(9, 18, 27), special=True),
    ),
    "flux2-klein-9b": (
        *("flux2-klein", "f2k9b", "flux_2_klein_9b"),
        partial(flux2, model="flux2-klein", layers=(9, 18, 27), special=True),
    ),
    "qwen-image": ("qwen-image", "qi", "qwen_image", qwen_image),
    "qwen-image-layered": ("qwen-image", "qil", "qwen_image", qwen_image),
    "z-image": ("z-image", "zi", "z_image", z_image),
    "krea2": ("krea2", "kr2", "krea2", krea2),
}
"""Pipeline, the names of the architecture in files' names and in files, what is in a file."""
VARLEN = ("t5", "vl_embed", "llm_embed", "krea2_vl_embed")


def read_musubi(folder: Path, short: str, full: str) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """Caption and tensors by stem, as `BucketBatchManager` takes them."""
    found = {}
    for file in folder.glob(f"*_{short}_te.safetensors"):
        content = {}
        with safe_open(file, "pt") as opened:
            said = opened.metadata()
            for key in list(opened.keys()):  # not a dict
                name, tensor = key, opened.get_tensor(key)
                if not key.endswith("_mask"):
                    name, _, dtype = key.rpartition("_")
                    assert str(tensor.dtype) == f"torch.{dtype}"
                assert key.startswith("varlen_") == (name.removeprefix("varlen_") in VARLEN)
                content[name.removeprefix("varlen_")] = tensor
        assert (said["architecture"], said["format_version"]) == (full, "1.0.1")
        found[file.name.removesuffix(f"_{short}_te.safetensors")] = said["caption1"], content
    return found


def listed(folder: Path, texts: list[str], files: tuple[str, ...] = FILES) -> Path:
    """Items, called as musubi-tuner calls them or otherwise."""
    path = folder / "items.jsonl"
    names = ("file", "image_path", "video_path", "file_name")
    rows = (
        {"caption": text, names[number % 4]: file, "count": 3}
        for number, (text, file) in enumerate(zip(texts, files, strict=False))
    )
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return path


def compare(got: Mapping[str, Tensor], wanted: Wanted) -> None:
    assert sorted(got) == sorted(wanted)
    for name, live in wanted.items():
        assert live is not None
        tensor = got[name]
        assert (tensor.shape, tensor.dtype) == (live.shape, live.dtype), name
        if live.dtype == torch.float32:
            scale = float(live.abs().max())
            torch.testing.assert_close(tensor, live, rtol=0, atol=2e-5 * scale)
        else:
            assert torch.equal(tensor, live), name


@pytest.mark.parametrize("architecture", MUSUBI)
def test_musubi_tuner_reads_what_its_own_encoder_gives(
    workshop: Workshop, tmp_path: Path, architecture: str
) -> None:
    pipeline, short, full, wanted = MUSUBI[architecture]
    texts = prompts_of(pipeline)
    items = listed(tmp_path, texts)
    store = open_store(workshop.cache(pipeline))
    done = plan_export(store, f"musubi:{architecture}", items).write(tmp_path / "out")
    found = read_musubi(tmp_path / "out", short, full)
    stems = ["fox", "a.b", "x_y", "c", "d", "e", "f"][: len(texts)]
    assert (sorted(found), done.texts) == (sorted(stems), len(texts))
    for text, stem in list(zip(texts, stems, strict=True))[:3]:
        caption, content = found[stem]
        assert caption == text
        compare(content, wanted(partial(see, workshop), text))


def padding_with_exclamation_marks(workshop: Workshop) -> str:
    """A tokenizer that pads as SDXL's second one does: with token 0."""
    folder = workshop.root / "pads-with-0"
    if not folder.exists():
        folder.mkdir()
        for file in workshop.model("clip-projection").glob("tokenizer*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        config = folder / "tokenizer_config.json"
        said = json.loads(config.read_text()) | {"pad_token": "!"}
        config.write_text(json.dumps(said))
    return str(folder)


def kohya_cache(workshop: Workshop, pipeline: str) -> Path:
    """A cache whose second CLIP pads with token 0, as published ones do."""
    if pipeline not in ("sdxl", "sd3"):
        return workshop.cache(pipeline)
    folder = workshop.root / f"kohya-{pipeline}"
    for part, model in PIPELINES[pipeline].items():
        zeros = padding_with_exclamation_marks(workshop) if part == "text_encoder_2" else None
        workshop.fill(folder, f"{pipeline}:{part}", model, tokenizer=zeros)
    return folder


def clip(see: See, model: str, text: str, **others: Any) -> Seen:
    return see(model, text, 77, masked=False, **others)


def sdxl(see: See, text: str) -> Wanted:
    first, second = clip(see, "clip", text), clip(see, "clip-projection", text, pad_token="!")
    return {
        "hidden_state1": first.states[-2],
        "hidden_state2": second.states[-2],
        "pool2": second.embeds,
    }


def sd3(see: See, text: str) -> Wanted:
    first = clip(see, "clip-projection", text)
    second = clip(see, "clip-projection-2", text, pad_token="!")
    t5 = see("wide-t5", text, 256, masked=False)
    assert first.embeds is not None
    assert second.embeds is not None
    return {
        "lg_out": torch.cat([first.states[-2], second.states[-2]], -1),
        "lg_pooled": torch.cat([first.embeds, second.embeds]),
        "t5_out": t5.last,
        "clip_l_attn_mask": first.mask,
        "clip_g_attn_mask": second.mask,
        "t5_attn_mask": t5.mask,
        "apply_lg_attn_mask": torch.tensor(False),
        "apply_t5_attn_mask": torch.tensor(False),
    }


def flux(see: See, text: str) -> Wanted:
    t5 = see("t5", text, 512, masked=False)
    return {
        "l_pooled": clip(see, "clip", text).pooled,
        "t5_out": t5.last,
        "txt_ids": torch.zeros(512, 3),
        "t5_attn_mask": t5.mask,
        "apply_t5_attn_mask": torch.tensor(False),
    }


def lumina2(see: See, text: str) -> Wanted:
    system = part_of("lumina2").template.removesuffix(" <Prompt Start> {}")
    seen = see("gemma2", f"{system} <Prompt Start> {text}", 256, padding_side="right")
    return {
        "hidden_state": padded(seen.states[-2][seen.real], 256),
        "attention_mask": seen.mask,
        "input_ids": seen.ids,
    }


KOHYA: Mapping[str, tuple[str, Callable[[See, str], Wanted]]] = {
    "sdxl": ("_te_outputs.npz", sdxl),
    "sd3": ("_sd3_te.npz", sd3),
    "flux": ("_flux_te.npz", flux),
    "lumina2": ("_lumina_te.npz", lumina2),
}


@pytest.mark.parametrize("architecture", KOHYA)
def test_sd_scripts_read_what_their_own_encoders_give(
    workshop: Workshop, tmp_path: Path, architecture: str
) -> None:
    ending, wanted = KOHYA[architecture]
    texts = prompts_of(architecture)
    store = open_store(kohya_cache(workshop, architecture))
    plan = plan_export(store, f"kohya:{architecture}", listed(tmp_path, texts))
    plan.write(tmp_path / "out")
    for text, file in list(zip(texts, FILES, strict=False))[:3]:
        beside = tmp_path / "out" / (file.rpartition(".")[0] + ending)
        with np.load(beside) as read:
            compare(
                {name: torch.from_numpy(read[name]) for name in read.files},
                wanted(partial(see, workshop), text),
            )
    assert len([path for path in (tmp_path / "out").rglob("*") if path.is_file()]) == len(texts)


def test_narrow_values_stay_so_where_the_format_has_them(
    workshop: Workshop, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    workshop.fill(cache, "flux:text_encoder", "clip", store_dtype="bfloat16")
    workshop.fill(cache, "flux:text_encoder_2", "t5", store_dtype="float16", max_length=256)
    items = listed(tmp_path, prompts_of("flux"))
    plan_export(open_store(cache), "kohya:flux", items).write(tmp_path / "kohya")
    with np.load(tmp_path / "kohya" / "fox_flux_te.npz") as read:
        assert [read[name].dtype for name in ("l_pooled", "t5_out")] == [np.float32, np.float16]
        assert (read["t5_out"].shape, read["txt_ids"].shape) == ((256, 32), (256, 3))
    with pytest.raises(EnginecastError, match="max_length: expected 512, got 256"):
        plan_export(open_store(cache), "musubi:flux-kontext", items)
    stored = (
        open_cache(cache, "text_encoder").by_text(prompts_of("flux")[0]).outputs["pooler_output"]
    )
    assert stored.dtype.name == "bfloat16"


def test_what_a_trainer_cannot_read_is_refused(
    workshop: Workshop, tmp_path: Path, capsys: Out
) -> None:
    out = tmp_path / "out"
    flux, sdxl = workshop.cache("flux"), workshop.cache("sdxl")
    texts = prompts_of("flux")
    good = listed(tmp_path, texts)

    def refused(
        cache: Path, name: str, *said: str, items: Path | None = good, more: Any = ()
    ) -> None:
        given = () if items is None else ("--items", items)
        ran = cast(capsys, "cache", "export", cache, "-o", out, "--format", name, *given, *more)
        assert (ran.code, ran.out) == (2, "")
        for one in said:
            assert one in " ".join(ran.err.split()), ran.err
        assert not out.exists()

    refused(sdxl, "kohya:sdxl", "padding_id: expected 0, got 2")
    lone = workshop.cache("z-image")
    refused(
        *(lone, "musubi:flux-kontext", "needs what flux:text_encoder gives (CLIPTextModel)"),
        *("template: expected '{}', got", "outputs: expected pooler_output, got hidden_states.-2"),
    )
    refused(
        *(lone, "musubi:hunyuan-video", "skip_rows: expected 95, got 0"),
        *("--for hunyuan-video:text_encoder --name OTHER",),
    )
    half = tmp_path / "half"
    workshop.fill(half, "flux:text_encoder", "clip")
    refused(
        *(half, "kohya:flux", "flux:text_encoder_2 gives (T5EncoderModel)", "no encoder"),
        *(f"cache fill ENCODER --prompts FILE -o {half} --for flux:text_encoder_2",),
    )
    refused(flux, "kohya:flux", "expected a name for each", more=("--name", "text_encoder"))
    refused(flux, "kohya:flux", "expected --items FILE", items=None)
    refused(flux, "kohya:flow", "expected parquet, safetensors, pt, npz, musubi:wan")
    refused(flux, "diffusion-pipe:flux", "fingerprint", "There are: parquet")
    refused(flux, "musubi:kandinsky5", "another template")
    refused(flux, "npz", "only for --format TRAINER:ARCHITECTURE", more=("--name", "text_encoder"))
    here = tmp_path / "there"
    here.mkdir()

    def items(*rows: object) -> Path:
        path = here / "bad.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    fox = {"text": texts[0], "file": "a/fox.png"}
    same = items(fox, {"text": texts[1], "file": "b/fox.webp"})
    refused(flux, "musubi:flux-kontext", "of line 1 both make fox_fk_te.safetensors", items=same)
    unknown = items(fox, {"text": "a purple whale", "file": "whale.png"})
    refused(flux, "kohya:flux", ":2:", "(1 of 2 texts are missing)", items=unknown)
    away = items({**fox, "file": "../fox.png"})
    refused(flux, "kohya:flux", "expected a path within the folder of the images", items=away)
    refused(flux, "kohya:flux", ":1: expected one string", items=items({"file": "x.png"}))
    refused(flux, "kohya:flux", ":2: expected a JSON object", items=items(fox, 3))
    refused(flux, "kohya:flux", "expected items, got none", items=items())
    refused(flux, "kohya:flux", "No such file", items=tmp_path / "none.jsonl")


def test_the_command_writes_once(workshop: Workshop, tmp_path: Path, capsys: Out) -> None:
    cache, out = workshop.cache("flux"), tmp_path / "out"
    items = listed(tmp_path, prompts_of("flux"))
    command = ("cache", "export", cache, "-o", out, "--format", "kohya:flux", "--items", items)
    told = cast(capsys, *command, "--json").json
    assert (told["texts"], told["name"]) == (len(prompts_of("flux")), "text_encoder,text_encoder_2")
    assert told["bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    again = cast(capsys, *command)
    assert (again.code, "already exists" in again.err) == (2, True)
    swapped = cast(capsys, *command, "--name", "text_encoder_2,text_encoder")
    assert (swapped.code, "outputs: expected pooler_output" in swapped.err) == (2, True)


def test_a_full_disk_leaves_nothing(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = listed(tmp_path, prompts_of("wan"))
    plan = plan_export(open_store(workshop.cache("wan")), "musubi:wan", items)
    written: list[Path] = []

    def failing(path: Path, *content: Any) -> None:
        if written:
            raise OSError(errno.ENOSPC, "full", str(path))
        written.append(path)
        write_arrays(path, *content)

    monkeypatch.setattr("enginecast.cache.upkeep.trainers.write_arrays", failing)
    with pytest.raises(MissingError):
        plan.write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["items.jsonl"]


def test_every_format_is_read_back() -> None:
    names = {one.name for one in table().formats}
    assert names == {*(f"musubi:{name}" for name in MUSUBI), *(f"kohya:{name}" for name in KOHYA)}
