"""Encoder-decoders as two engines in one bundle: what is verified, refused, and generated."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_decoders import encoder_decoder, small_one
from exports import cast
from generating import export
from transformers import (
    GenerationConfig,
    MarianMTModel,
)

import enginecast
from enginecast.capture.sources.factory import take_module
from enginecast.capture.sources.generation.encoder_decoder import (
    CrossDecoderSource,
    EncoderSource,
    as_generating,
)
from enginecast.capture.tracing import captured as tracing
from enginecast.cli.app import main
from enginecast.errors import BundleError, UsageError, VerificationError
from enginecast.runtime import Generator, generate
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.generation import Sampling, not_heeded


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(encoder_decoder("t5"), tmp_path_factory.mktemp("t5") / "bundle").root


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
            main([*words, "--kv-cache"])
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
