"""Encoder-decoders as two engines in one bundle: what is verified, refused, and generated."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_decoders import MODELS, encoder_decoder, small_one
from exports import cast
from generating import export
from transformers import (
    GenerationConfig,
    MarianMTModel,
)

import enginecast
from enginecast.capture.inputs.examples import verification_inputs
from enginecast.capture.sources.factory import take_module
from enginecast.capture.sources.generation.encoder_decoder import (
    CrossDecoderSource,
    EncoderSource,
    as_generating,
)
from enginecast.capture.sources.huggingface.transformers_folder import open_folder
from enginecast.capture.tracing import captured as tracing
from enginecast.cli.app import main
from enginecast.errors import BundleError, InputError, UsageError, VerificationError
from enginecast.runtime import Generator, generate
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.engine import Engine
from enginecast.runtime.generation import Sampling, not_heeded


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(encoder_decoder("t5"), tmp_path_factory.mktemp("t5") / "bundle").root


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with enginecast.load(bundle) as engine:
        yield engine


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts, padded on the right."""
    ids = torch.randint(3, 99, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 6:], mask[2, 2:] = 0, 0
    return ids * mask, mask


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a model of a layer, beside the folder of the model, by the command line."""
    folder = tmp_path_factory.mktemp("small")
    small_one().save_pretrained(folder / "model")
    words = ["export", str(folder / "model"), "-o", str(folder / "bundle"), "--no-speed", "-q"]
    with pytest.MonkeyPatch.context() as patch:
        # Half of the time, and it has tests of its own: whether other sizes take another path.
        patch.setattr(tracing, "_swept", lambda *_: ())
        with pytest.raises(SystemExit) as ended:
            main([*words, "--task", "text-generation"])
    assert ended.value.code == 0
    return folder / "bundle"


def test_from_the_command_line_to_the_tokens_of_transformers(small: Path) -> None:
    model: Any = MarianMTModel.from_pretrained(small.with_name("model"))
    prompts = torch.tensor([[5, 7, 9, 11], [8, 3, 0, 0]])
    mask = (prompts != 0).long()
    options: dict[str, Any] = {"max_new_tokens": 11, "repetition_penalty": 1.3}
    wanted: Any = model.generate(prompts, attention_mask=mask, do_sample=False, **options)
    assert len({*wanted[:, 1:].flatten().tolist()}) > 3  # not one token over and over
    with enginecast.load(small, require="verified") as engine:
        assert (generate(engine, prompts, mask, **options) == wanted.numpy()).all()
        assert torch.equal(
            Generator(engine).generate(prompts, attention_mask=mask, **options), wanted
        )
        other = generate(engine, prompts, **options)  # padding is read
    assert (other[1] != wanted[1].numpy()).any()


@pytest.mark.slow
def test_commands_know_which_part_of_the_model_a_bundle_is(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small.with_name("model")
    for folder in (small, small / "encoder"):
        given = ["--model", model, "--against", "eager", "--rounds", 3]
        found = cast(capsys, "bench", folder, *given, "--json").json
        assert (list(found["rows"]), found["absent"], found["notes"]) == (
            ["eager", "engine"],
            [],
            [],
        )
        assert found["rows"]["eager"]["relative_error"] < 1e-4


@pytest.mark.slow
def test_what_does_not_fit_is_refused(engine: Engine) -> None:
    ids, _ = texts()
    with pytest.raises(InputError, match=r"expected rows that begin with 1, .* got \[5, 5, 5\]"):
        generate(engine, ids, decoder_input_ids=torch.full((3, 2), 5))
    with pytest.raises(InputError, match="decoder_input_ids: expected 3 rows, got 2"):
        generate(engine, ids, decoder_input_ids=torch.full((2, 2), 1))
    with pytest.raises(InputError, match="expected input_ids, which the encoder reads"):
        generate(engine, {"input_features": ids})
    with pytest.raises(InputError, match="leave room for 97 new tokens"):
        generate(engine, ids, max_new_tokens=97)
    with pytest.raises(UsageError, match="expected prompts once, as input_ids"):
        Generator(engine).generate(ids, input_ids=ids)
    with pytest.raises(UsageError, match="num_beams=4 is not heeded"):
        Generator(engine).generate(ids, num_beams=4)


@pytest.mark.slow
def test_the_encoder_is_a_bundle_in_the_bundle(bundle: Path, engine: Engine) -> None:
    part = open_bundle(bundle).parts["encoder"]
    assert engine.manifest.parts[0].sha256 == part.sha256
    assert engine.parts["encoder"].verdict.outcome == "verified"
    stored = {file.name for file in part.manifest.files}
    assert {"engine.onnx", "weights.safetensors", "reference.safetensors"} <= stored
    ids, mask = (tensor.numpy() for tensor in texts())
    with enginecast.load(bundle / "encoder") as encoder:
        found = encoder.run({"input_ids": ids, "attention_mask": mask})
    assert set(found) <= {spec.name for spec in engine.inputs}
    assert found["cross_key_values_1_value"].shape == (3, 4, 9, 8)
    engine.close()
    with pytest.raises(UsageError, match="is closed"):
        engine.parts["encoder"].run({"input_ids": ids, "attention_mask": mask})


@pytest.mark.slow
def test_verify_looks_at_both_parts(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = cast(capsys, "verify", bundle, "--json").json
    assert found["outcome"] == "verified"
    assert any(note.startswith("encoder: verified") for note in found["notes"])
    inspected = cast(capsys, "inspect", bundle, "--json").json
    assert inspected["generation"]["encoder"] == "encoder"


@pytest.mark.slow
def test_a_damaged_or_exchanged_encoder_is_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "copy")
    weights = tmp_path / "copy" / "encoder" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleError, match="encoder: the files do not agree"):
        enginecast.load(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "encoder")
    with pytest.raises(BundleError, match="encoder is missing"):
        open_bundle(tmp_path / "copy", check="size")
    shutil.copytree(bundle, tmp_path / "copy" / "encoder")
    with pytest.raises(BundleError, match=r"manifest\.json has sha256"):
        open_bundle(tmp_path / "copy", check="size")


def test_ids_are_suppressed_and_forced_as_the_generation_config_says() -> None:
    model = encoder_decoder("bart")
    model.generation_config = GenerationConfig(
        decoder_start_token_id=[1],
        bos_token_id=1,
        suppress_tokens=[5, 6],
        forced_bos_token_id=9,
        forced_eos_token_id=[2],
        num_beams=4,
        no_repeat_ngram_size=3,
        lang_to_id={"en": 3},
    )
    source = as_generating(take_module(model, {}), "text-generation")
    assert isinstance(source, CrossDecoderSource)
    assert source.start_ids == (1,)
    assert source.ids_of("suppress_tokens") == (5, 6)
    assert not_heeded(source.generation_config) == (
        "num_beams",
        "no_repeat_ngram_size",
        "lang_to_id",
    )
    scores = Sampling(
        suppress_tokens=(0, 400), begin_suppress_tokens=(1,), forced_eos_token_id=(2,)
    )
    ids, logits = np.zeros((2, 3), np.int64), np.zeros((2, 4), np.float32)
    assert np.isinf(scores.scores(ids, logits, 0)).tolist() == [[True, True, False, False]] * 2
    assert np.isinf(scores.scores(ids, logits, 1)).tolist() == [[True, False, False, False]] * 2
    with pytest.raises(UsageError, match="forced_bos_token_id: expected an id that is not suppr"):
        Sampling(suppress_tokens=(3,), forced_bos_token_id=3)
    with pytest.raises(UsageError, match=r"forced_eos_token_id: .* got 3, 4"):
        Sampling(suppress_tokens=(3, 4, 5), forced_eos_token_id=(3, 4))
    last = np.isinf(scores.scores(ids, logits, 2, last=True))
    assert last.tolist() == [[True, True, False, True]] * 2


def test_a_folder_is_loaded_whole(tmp_path: Path) -> None:
    encoder_decoder("t5").save_pretrained(tmp_path)
    source = as_generating(open_folder(tmp_path, None), "text-generation")
    assert isinstance(source, CrossDecoderSource)
    assert source.model_class is not None
    assert source.model_class.__name__ == "T5ForConditionalGeneration"
    assert "decoder.block.0.layer.1.EncDecAttention.k.weight" in source.weights()
    config = json.loads((tmp_path / "generation_config.json").read_text())
    before = source.fingerprint()
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**config, "decoder_start_token_id": 4})
    )
    other = as_generating(open_folder(tmp_path, None), "text-generation")
    assert isinstance(other, CrossDecoderSource)
    assert other.start_ids == (4,)
    assert other.fingerprint() != before


@pytest.mark.parametrize("name", MODELS)
def test_cases_have_sizes_that_belong_together(name: str) -> None:
    source = as_generating(take_module(encoder_decoder(name), {}), "text-generation")
    specs = source.inputs()
    lengths = set()
    for case in verification_inputs(specs, 0, parameters=1000):
        past = case.inputs["past_key_values_0_key"].shape[2]
        sequence = case.inputs["decoder_input_ids"].shape[1]
        assert case.inputs["decoder_attention_mask"].shape[1] == past + sequence
        length = case.inputs["cross_key_values_0_key"].shape[2]
        if name != "whisper":
            mask = case.inputs["encoder_attention_mask"]
            assert mask.shape[1] == length
            assert mask.any(1).all()
        lengths.add(length)
    assert (lengths == {20}) == (name == "whisper")


def test_models_that_do_not_come_apart_are_refused() -> None:
    model = encoder_decoder("bart").get_encoder()
    with pytest.raises(UsageError, match="expected a model of transformers with generate"):
        as_generating(take_module(model, {}), "text-generation")
    model = encoder_decoder("bart")
    with pytest.raises(UsageError, match="comes with example inputs"):
        as_generating(take_module(model, {"input_ids": torch.ones(1, 2)}), "text-generation")


PLACES = {
    "encoder": "encoder.block.0.layer.0.SelfAttention.v.weight",
    "cross": "decoder.block.1.layer.1.EncDecAttention.k.weight",
    "cross query": "decoder.block.1.layer.1.EncDecAttention.q.weight",
    "decoder": "decoder.block.0.layer.2.DenseReluDense.wo.weight",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_mutated_weight_is_rejected(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is captured and of eager beside it: `generate` of the model alone tells."""
    source, encoder = CrossDecoderSource, EncoderSource
    plain, projecting, weights = source._stepping, encoder._projecting, encoder.weights

    def mutated(model: torch.nn.Module) -> torch.nn.Module:
        path, _, name = PLACES[place].rpartition(".")
        owner = model.get_submodule(path)
        weight = owner.get_parameter(name)
        if not weight.is_meta:  # another one, for the model's own stays as it is
            setattr(owner, name, torch.nn.Parameter(weight * 1.01, requires_grad=False))
        return model

    monkeypatch.setattr(source, "_stepping", lambda self, m: plain(self, mutated(m)))
    monkeypatch.setattr(encoder, "_projecting", lambda self, m: projecting(self, mutated(m)))

    def changed(self: Any) -> dict[str, torch.Tensor]:
        found = dict(weights(self))
        found[PLACES[place]] = found[PLACES[place]] * 1.01
        return found

    monkeypatch.setattr(encoder, "weights", changed)
    monkeypatch.setattr(source, "weights", changed)
    with pytest.raises(VerificationError, match="generating: "):
        export(encoder_decoder("t5"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
