"""Whole pipelines: a folder of diffusers in, a folder of engines out, pictures, what is refused."""

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from exports import cast
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_pipelines import PIPELINES, asked, image_options, save_pipeline
from transformers import CLIPTextConfig, CLIPTextModel

from enginecast.compiler.request import ExportRequest
from enginecast.errors import CaptureError, EnginecastWarning, VerificationError
from enginecast.pipelines import export as exporting
from enginecast.pipelines.attach import attach
from enginecast.pipelines.check import (
    NOISE,
    compare,
    relative_error,
    with_noise,
)
from enginecast.pipelines.folder import open_pipeline
from enginecast.pipelines.generate import Made, Wish, generate
from enginecast.pipelines.record import (
    INDEX,
    RECORD,
    CheckOutcome,
    EngineOutcome,
    read_record,
    usable_record,
)
from enginecast.runtime.bundle.manifest import Downgrade

SMALL = ("--height", 48, "--width", 48, "--steps", 2)
EAGER = ("--eager", "unet", "--eager", "vae")


@pytest.fixture(scope="module")
def sd15(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text encoder of one layer, which is the one component that is exported."""
    folder = save_pipeline("sd15", tmp_path_factory.mktemp("pipelines") / "sd15")
    edit_text_encoder(folder, num_hidden_layers=1)
    return folder


@pytest.fixture
def broken(sd15: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return shutil.copytree(sd15, tmp_path / "broken")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), "utf-8")


def edit_text_encoder(folder: Path, **changes: Any) -> None:
    config = CLIPTextConfig.from_pretrained(folder / "text_encoder", **changes)
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")


def to_images(folder: Path) -> None:
    edit(folder / INDEX, _class_name="StableDiffusionImg2ImgPipeline")


def test_a_pipeline_is_exported_checked_and_run(
    sd15: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "engines"
    done = cast(capsys, "diffusers", "export", sd15, "-o", output, *SMALL, *EAGER, "--json", "-q")
    assert done.code == 0, done.out
    parts = done.json["components"]
    assert parts["text_encoder"]["outcome"] == "engine"
    assert parts["text_encoder"]["engines"]["forward"]["outcome"] == "verified"
    assert {parts[name]["reason"] for name in ("unet", "vae")} == {"as asked"}
    check = done.json["check"]
    assert check["outcome"] == "verified"
    assert [step["name"] for step in check["steps"]] == ["step 1", "step 2"]
    assert check["parts_at"] is None
    assert check["psnr"] > 100
    assert not list((output / "text_encoder").glob("*.safetensors"))
    assert list((output / "unet").glob("*.safetensors"))

    pipe = open_pipeline(sd15).load()
    eager = attach(pipe, output)
    engine, checked = pipe.text_encoder, eager.check(steps=2, height=48, width=48)
    assert pipe.text_encoder is engine is not eager["text_encoder"]
    assert checked.outcome == check["outcome"]
    assert [step.error for step in checked.steps] == [step["error"] for step in check["steps"]]
    assert [step.limit for step in checked.steps] == [step["limit"] for step in check["steps"]]
    eager.put_back()

    ran = cast(capsys, "diffusers", "run", output, "--prompt", "a fox", "-o", tmp_path / "fox.png")
    assert ran.code == 0, ran.err
    assert f"{tmp_path / 'fox.png'}: 50 steps at 48 x 48" in ran.out  # and not the recorded 2
    with Image.open(tmp_path / "fox.png") as image:
        assert image.size == (48, 48)

    several = ("-o", tmp_path / "foxes.png", "--steps", 2, "--set", "num_images_per_prompt=2")
    ran = cast(capsys, "diffusers", "run", output, "--prompt", "a fox", *several, "--json")
    assert ran.json["files"] == [str(tmp_path / name) for name in ("foxes.png", "foxes-2.png")]
    assert (tmp_path / "foxes.png").read_bytes() != (tmp_path / "foxes-2.png").read_bytes()
    for wrong in ("num_images_per_prompt=0", "latents=[1]"):  # it fails in the pipeline's own code
        one = ("--prompt", "a", "-o", tmp_path / "fox.png", "--set", wrong)
        ran = cast(capsys, "diffusers", "run", output, *one)
        assert ran.code == 2
        assert "error: StableDiffusionPipeline: " in ran.err

    require_each_component(sd15, output, capsys)
    again = cast(capsys, "diffusers", "export", output, "-o", tmp_path / "again")
    assert again.code == 2
    assert f"{output} holds engines already" in again.err
    again = cast(capsys, "diffusers", "export", sd15, "-o", output, *SMALL)
    assert again.code == 2
    assert "a pipeline of engines already exists\nReplace it with --overwrite" in again.err
    again = cast(capsys, "diffusers", "export", output / "text_encoder" / "forward", "-o", "y")
    assert "is a bundle, and not a diffusion pipeline" in again.err

    edit(output / RECORD, versions={**done.json["versions"], "diffusers": "0.1"})
    with pytest.warns(EnginecastWarning, match=r"made with diffusers 0\.1; here is"):
        usable_record(output)
    edit(output / RECORD, check={**check, "outcome": "rejected", "reasons": ["step 1: off"]})
    refused = cast(
        capsys, "diffusers", "run", output, "--prompt", "a fox", "-o", tmp_path / "a.png"
    )
    assert refused.code == 2
    assert "the pipeline was rejected: step 1: off" in refused.err


def test_a_loud_component_is_in_fp16_where_a_plain_conversion_is_not_finite(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = broken / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    table = next(each for name, each in weights.items() if name.endswith("token_embedding.weight"))
    table[:, 1] = 2e5
    save_file(weights, file, metadata={"format": "pt"})
    half = open_pipeline(broken).load(dtype=torch.float16)
    assert not generate(half, Wish(steps=2, height=40, width=40)).latents[-1].isfinite().any()
    half_size = ("--height", 40, "--width", 40, "--steps", 2, "--precision", "fp16")
    words = ("diffusers", "export", broken, "-o", tmp_path / "engines", *half_size, *EAGER)
    done = cast(capsys, *words, "--json", "-q")
    assert done.code == 0, done.err
    (engine,) = done.json["components"]["text_encoder"]["engines"].values()
    assert engine["outcome"] == done.json["check"]["outcome"] == "verified-by-emulation"
    assert done.json["check"]["steps"][-1]["error"] < 5e-3

    with patch.object(exporting, "_engine", side_effect=VerificationError("rejected: NaN")):
        done = cast(capsys, *words, "--overwrite", "--json")
    assert done.code == 1
    reason = "rejected: NaN; to try: --component text_encoder=bf16, or fp32 on a GPU without bf16"
    assert done.json["components"]["text_encoder"]["reason"] == reason


def require_each_component(source: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What takes a bundle takes the pipeline, component by component, or says what was meant."""
    engine, name = output / "text_encoder" / "forward", "text_encoder/forward"
    brief = ("--rounds", "3", "--seconds", "0")
    for command, *options in (
        ("verify",),
        ("verify", "--model", source),
        ("inspect",),
        ("bench", *brief),
        ("report",),
        ("report", output),
    ):
        done = cast(capsys, command, output, *options, "--json")
        assert done.code == 0, done.err
        parts = {each["component"]: each for each in done.json["components"]}
        assert [*parts] == [name, "unet", "vae"]
        assert {parts[each]["eager"] for each in ("unet", "vae")} == {"as asked"}
        assert parts[name]["exit_code"] == 0
        assert parts[name]["result"]
        assert done.json["pipeline"] == "StableDiffusionPipeline"
    shown = cast(capsys, "verify", output).out
    assert "StableDiffusionPipeline; whole pipeline, when it was exported: verified" in shown
    assert f"\n{name}:\n" in shown
    assert "\nunet: eager, as asked\n" in shown
    texts = output.with_name("texts.txt")
    texts.write_text("a fox")
    for words, said in (
        (("run", output, "--inputs", "x", "-o", "y"), "`enginecast diffusers run` makes pictures"),
        (("export", output, "-o", "y"), "expected a model, but it is a pipeline of engines"),
        (("export", source, "-o", "y"), "`enginecast diffusers export"),
        (("verify", source), "expected a bundle, but it is a pipeline of diffusers"),
        (("report", source), "expected a bundle, but it is a pipeline of diffusers"),
        (("cache", "fill", output, "--prompts", texts, "-o", "y"), f"such as {engine}"),
        (("verify", output, "--model", engine), "expected the folder of a pipeline, with model_in"),
        (("verify", output, "--inputs", "x"), f"Its bundles: {engine}"),
        (("report", output, engine), f"OTHER {engine}: expected a pipeline of engines, too"),
    ):
        refused = cast(capsys, *words)
        assert refused.code == 2
        assert said in refused.err
    weights = engine / "weights.safetensors"
    whole = weights.read_bytes()
    weights.chmod(0o600)
    weights.write_bytes(whole[:-1])
    done = cast(capsys, "verify", output, "--json")
    assert done.code == done.json["components"][0]["exit_code"] == 2
    assert done.json["components"][0]["result"]["error"] == "BundleError"
    assert f"exit codes of components: {name} (2)" in cast(capsys, "verify", output).out
    weights.write_bytes(whole)
    with patch("enginecast.cli.inspect.command._plan") as plan:
        assert cast(capsys, "inspect", source, "--height", 32).code == 0
    asked = {Path(each.args[1].model).name: each.args[1] for each in plan.call_args_list}
    assert {n: each.options.component.height for n, each in asked.items()} == {
        "text_encoder": None,
        "unet": 32,
        "vae": 32,
    }


@pytest.mark.slow
def test_a_component_that_fails_is_named_and_stays_eager(
    sd15: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(asked: ExportRequest, _: object) -> None:
        Path(f"{asked.output}.rejected").mkdir(exist_ok=True)
        if str(asked.model).endswith("text_encoder"):
            raise KeyError("wrong")
        raise CaptureError("torch.export refused the model", hint="Try another one.")

    monkeypatch.setattr(exporting, "export", refuse)
    output = tmp_path / "engines"
    done = cast(capsys, "diffusers", "export", sd15, "-o", output, *SMALL, "--eager", "vae")
    assert done.code == 1
    for part in ("text_encoder", "unet"):
        assert sorted(file.name for file in (output / part).iterdir()) == sorted(
            file.name for file in (sd15 / part).iterdir()
        )
    record = read_record(output)
    assert {n: part.outcome for n, part in record.components.items()} == {
        "text_encoder": "failed",
        "unet": "failed",
        "vae": "eager",
    }
    assert record.components["unet"].reason == "torch.export refused the model Try another one."
    reason = record.components["text_encoder"].reason
    assert reason == "a defect of enginecast: KeyError: 'wrong'"
    assert "unet stays eager: torch.export refused the model" in done.err
    assert "component: unet stays eager: torch.export refused the model" in done.out
    own = "--eager text_encoder --eager unet"
    assert f"export again with {own} or --allow-fallback" in done.out
    assert [each.consent for each in record.downgrades] == ["missing", "missing"]
    assert record.sizes == ((48, 48), (16, 32))
    few = ("-o", tmp_path / "fox.png", "--steps", 2)
    ran = cast(capsys, "diffusers", "run", output, "--prompt", "a fox", *few)
    assert ran.code == 0, ran.err
    words = ("diffusers", "export", sd15, "-o", output, *SMALL, "--eager", "vae", "--overwrite")
    done = cast(capsys, *words, "--allow-fallback", "--json")
    assert done.code == 0, done.err
    assert [each["consent"] for each in done.json["downgrades"]] == ["given", "given"]
    everything = (*EAGER, "--eager", "text_encoder", "--overwrite")
    done = cast(capsys, "diffusers", "export", sd15, "-o", output, *SMALL, *everything)
    assert done.code == 0, done.err
    assert "whole pipeline: not run: no component is an engine" in done.out
    assert {part.outcome for part in read_record(output).components.values()} == {"eager"}


def test_a_rejected_pipeline_is_kept_beside(
    sd15: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rejected = CheckOutcome(outcome="rejected", reasons=("step 2: off",), parts_at="step 2")
    monkeypatch.setattr(exporting, "_check", lambda *_: rejected)
    everything = (*SMALL, *EAGER, "--eager", "text_encoder")
    for _ in range(2):  # the second one replaces the first
        done = cast(capsys, "diffusers", "export", sd15, "-o", tmp_path / "engines", *everything)
        assert done.code == 1
        assert "whole pipeline: rejected: step 2: off" in done.out
    assert [each.name for each in tmp_path.iterdir()] == ["engines.rejected"]
    options = ("--prompt", "a fox", "-o", tmp_path / "a.png")
    refused = cast(capsys, "diffusers", "run", tmp_path / "engines.rejected", *options)
    assert refused.code == 2
    assert "step 2: off" in refused.err


def test_a_component_of_torchscript_needs_consent(
    sd15: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = Downgrade(kind="sizes", text="of 4; --dynamic x:0=4 fixes", consent="not needed")
    script = Downgrade(kind="engine", text="no ONNX engine", option="--f", consent="given")
    made = EngineOutcome(outcome="verified", error=0.0), (offered, script)
    monkeypatch.setattr(exporting, "_engine", lambda *_: made)
    monkeypatch.setattr(exporting, "_check", lambda *_: CheckOutcome(outcome="verified"))
    words = ("diffusers", "export", sd15, "-o", tmp_path / "engines", *SMALL, *EAGER, "--json")
    done = cast(capsys, *words)
    assert done.code == 1
    sizes, engine = done.json["downgrades"]
    assert (sizes["text"], sizes["option"]) == ("text_encoder: of 4", "")
    assert (engine["option"], engine["consent"]) == ("--eager text_encoder", "missing")
    assert cast(capsys, *words, "--overwrite", "--allow-fallback").code == 0


def no_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def unknown_class(folder: Path) -> None:
    edit(folder / "model_index.json", _class_name="OtherPipeline")


def own_code(folder: Path) -> None:
    (folder / "pipeline.py").write_text("raise SystemExit", "utf-8")


def no_unet(folder: Path) -> None:
    shutil.rmtree(folder / "unet")


def pickled(folder: Path) -> None:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))


@pytest.mark.parametrize(
    ("break_it", "options", "said"),
    [
        (no_index, (), "is not a diffusion pipeline: it has no model_index.json"),
        (unknown_class, (), "has no pipeline 'OtherPipeline'"),
        (own_code, (), "needs code from its own repository"),
        (no_unet, (), "the component unet of model_index.json is missing"),
        (pickled, (), "is a pickle: loading it can run code"),
        (None, ("--variant", "fp16"), "no component has weights of the variant 'fp16'"),
        (None, ("--component", "prior=fp16"), "is not a component of the pipeline"),
        (None, ("--component", "unet"), "expected NAME=VALUE"),
        (None, ("--component", "unet=fp3"), "fp3"),
        (None, ("--eager", "unet", "--component", "unet=fp16"), "exclude each other"),
        (None, ("--set", "wrong=1"), "StableDiffusionPipeline has no wrong"),
        (None, ("--image", "nowhere.png"), "--image image=nowhere.png: "),
        (None, ("--image", "mask=model_index.json"), "--image mask=model_index.json: "),
        (None, ("--max-error", "latents=0.1"), "--max-error latents limits a quantization plan"),
        (None, ("--max-error", "latents=2"), "expected a number between 0 and 1"),
        (None, ("--set", "width=64"), "--set width: give --width"),
        (None, ("--guidance-scale", "nan"), "--guidance-scale nan: expected a finite number"),
        (to_images, (), "Give it an image: --image FILE"),
        (None, ("--height", "30", "--width", "30"), "divisible by 8"),
        (None, ("--steps", "0"), "--steps 0: expected at least 1"),
    ],
)
def test_bad_input_is_one_clear_error(
    break_it: Callable[[Path], None] | None,
    options: tuple[str, ...],
    said: str,
    broken: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if break_it:
        break_it(broken)
    done = cast(capsys, "diffusers", "export", broken, "-o", tmp_path / "engines", *options)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "engines").exists()


def test_a_folder_that_is_something_else_is_never_replaced(
    sd15: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = cast(capsys, "diffusers", "export", sd15, "-o", tmp_path, "--overwrite")
    assert done.code == 2
    assert f"{tmp_path}: exists and is not a pipeline of engines (it holds no {RECORD})" in done.err


@pytest.mark.parametrize(
    ("output", "said"),
    [("a.bmp", "ends in .png"), ("none/a.png", "there is no folder"), ("", "is not a pipeline of")],
)
def test_run_refuses_before_the_work(
    output: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / (output or "a.png")
    done = cast(capsys, "diffusers", "run", tmp_path, "--prompt", "a fox", "-o", file)
    assert done.code == 2
    assert said in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("device", "code"), [("cuda", 3), ("tpu", 2)])
def test_run_refuses_a_device_that_is_not_here(
    device: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", "a fox", "-o", tmp_path / "a.png", "--device", device)
    (tmp_path / RECORD).write_text("{}", encoding="utf-8")
    refused = cast(capsys, "diffusers", "run", tmp_path, *options)
    assert refused.code == code
    assert f"device {device}" in refused.err


def test_an_eager_pipeline_that_overflows_is_refused(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = broken / "vae" / "diffusion_pytorch_model.safetensors"
    weights = {name: tensor * 1e30 for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    done = cast(capsys, "diffusers", "export", broken, "-o", tmp_path / "engines", *SMALL)
    assert done.code == 2
    assert "the eager StableDiffusionPipeline gives values that are not finite" in done.err


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_pipeline_that_fails_on_two_prompts_is_run_on_one(
    sd15: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[Exception],
) -> None:
    """And a limit of latents is refused where none are handed out."""
    plain = diffusers.StableDiffusionPipeline.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **given: Any) -> Any:
        if isinstance(given["prompt"], list):
            raise error("one prompt at a time")
        given.pop("callback_on_step_end")
        return plain(self, *args, **given)

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", call)
    asked = ("--steps", 1, "--height", 48, "--width", 48, "--component", "unet=int8")
    command = ("diffusers", "export", sd15, "-o", tmp_path / "out", *asked)
    done = cast(capsys, *command, "--max-error", "latents=0.1")
    assert done.code == 2
    assert "fails on two prompts, and is exported for one" in done.err
    assert "--max-error latents: StableDiffusionPipeline hands out no latents" in done.err
    assert not (tmp_path / "out").exists()
    done = cast(capsys, *command, "--prompt", "a fox", "--prompt", "a lake")
    assert done.code == 2
    assert "one prompt at a time" in done.err


def test_what_the_engines_do_not_explain_is_rejected_where_it_begins(sd15: Path) -> None:
    pipe, wish = open_pipeline(sd15).load(), Wish(steps=3, height=32, width=32)
    eager = generate(pipe, wish)
    with with_noise(pipe):
        noisy = generate(pipe, wish)
    assert relative_error(eager.pictures, noisy.pictures) > NOISE / 10
    assert generate(pipe, wish).latents[-1].equal(eager.latents[-1])  # the noise is gone

    same = compare(eager, noisy, eager, 1e-6)
    assert not same.reasons
    assert same.psnr is None
    late = [eager.latents[0], *(each * 1.01 for each in eager.latents[1:])]
    found = compare(eager, noisy, Made(eager.pictures + 0.01, tuple(late)), 1e-6)
    assert found.parts_at == "step 2"
    assert found.psnr == pytest.approx(40, abs=0.1)
    nothing = Made(eager.pictures * math.nan, eager.latents)
    assert compare(eager, noisy, nothing, 1e-6).parts_at == "pictures"
    assert compare(eager, noisy, Made(noisy.pictures, noisy.latents), 1.0).steps[0].limit == 0.5


@pytest.mark.slow
def test_a_limit_of_latents_is_met_by_more_exact_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = save_pipeline("flux", tmp_path / "flux"), tmp_path / "engines"
    wish = ("--steps", 3, *asked("flux"), *(f"--eager={part}" for part in ("vae", "text_encoder")))
    wanted = ("--component", "transformer=int8", "--max-error", "latents=0.0005")
    done = cast(capsys, "diffusers", "export", folder, "-o", output, *wish, *wanted)
    assert done.code == 0, done.err
    assert "is planned again: rows within" in done.err
    off = read_record(output).check.prompts
    assert len(off) == 2
    assert max(each or 1.0 for each in off) <= 0.0005


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PIPELINES.keys() - {"z-image"}))
def test_every_pipeline_goes_in_and_makes_pictures(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Z-Image's calls have a list for a batch: its engine takes as many prompts as were recorded.
    folder, output = save_pipeline(name, tmp_path / name), tmp_path / "engines"
    images = image_options(name, tmp_path)
    sizes = ("--steps", 3, *asked(name), *images)
    done = cast(capsys, "diffusers", "export", folder, "-o", output, *sizes, "--json", "-q")
    assert done.code == 0, done.err
    assert {part["outcome"] for part in done.json["components"].values()} == {"engine"}
    assert done.json["check"]["outcome"] == "verified"
    assert len(done.json["check"]["steps"]) == 3
    is_video = "--frames" in sizes
    made = tmp_path / ("made" if is_video else "made.png")
    again = ("--prompt", "a tower", "--steps", 4, *images)
    ran = cast(capsys, "diffusers", "run", output, "-o", made, *again)
    assert ran.code == 0, ran.err
    files = sorted(made.iterdir()) if is_video else [made]
    assert len(files) == (PIPELINES[name].sizes["frames"] if is_video else 1)
    too_large = ("--height", 256, "--width", 256, *images)
    image = tmp_path / "large.gif"
    ran = cast(capsys, "diffusers", "run", output, "--prompt", "a", "-o", image, *too_large)
    assert ran.code == 2
    assert "The pipeline was recorded at" in ran.err
