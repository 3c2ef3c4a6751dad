"""Encoder-decoders as two engines in one bundle: what is verified, refused, and generated."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_decoders import MODELS, MORE, encoder_decoder, seeded, small_one
from exports import cast
from generating import Change, export, feed_otherwise
from transformers import (
    GenerationConfig,
    MarianMTModel,
    PreTrainedModel,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
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
from enginecast.compiler.export import session
from enginecast.errors import BundleError, InputError, UsageError, VerificationError
from enginecast.runtime import Generator, generate
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.engine import Engine
from enginecast.runtime.generation import Sampling, not_heeded
from enginecast.verification.generation import follow, read_continued, read_encoded


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


def continued(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    ids, mask = texts()
    found: Any = model.generate(ids, attention_mask=mask, do_sample=False, **options)
    return torch.as_tensor(found)


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


def test_fusions_are_expected_of_what_is_read_alone(small: Path) -> None:
    """The decoder stands in the captured program of the encoder, and is dead."""
    report = json.loads((small / "encoder" / "report.json").read_text())
    fusions = {each["kind"]: each["expected"] for each in report["fusions"]}
    assert fusions == {"attention": 1}
    assert not any(each["missing"] for each in report["fusions"])


def test_a_decoder_of_one_token_is_refused_before_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 8, "vocab_size": 9, "num_buckets": 4, "relative_max_distance": 8}
    sides = {
        f"{side}_{name}": number
        for side in ("encoder", "decoder")
        for name, number in {"ffn_dim": 8}.items()
    }
    layers = {f"num_{side}_layers": 1 for side in ("encoder", "decoder")}
    heads = {f"num_{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    config = ProphetNetConfig(**sizes, **sides, **layers, **heads)
    ProphetNetForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(session, "prepare", lambda *_, **__: pytest.fail("it was captured"))
    words = ["export", tmp_path / "model", "-o", tmp_path / "bundle", "--kv-cache"]
    ran = cast(capsys, *words)
    assert ran.code == 2
    assert "expected a model that reads several tokens after those in its cache, got Ass" in ran.err
    assert not (tmp_path / "bundle").exists()


OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 40},
    {"max_new_tokens": 12, "repetition_penalty": 1.3},
    {"max_new_tokens": 12, "repetition_penalty": 1.3, "eos_token_id": list(range(2, 30))},
    {"max_length": 9, "decoder_input_ids": torch.tensor([[1, 7, 8]] * 3)},
    {"max_new_tokens": 8, "suppress_tokens": [*range(20, 99)]},
    {"max_new_tokens": 8, "begin_suppress_tokens": [*range(3, 90)], "forced_bos_token_id": 50},
    {"max_new_tokens": 8, "begin_suppress_tokens": [*range(3, 90)]},
    {"max_new_tokens": 8, "forced_eos_token_id": 2, "repetition_penalty": 1.3},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_greedy_is_that_of_transformers(engine: Engine, options: dict[str, Any]) -> None:
    ids, mask = texts()
    found = Generator(engine).generate(ids, attention_mask=mask, **options)
    assert torch.equal(found, continued(encoder_decoder("t5"), **options))


@pytest.mark.slow
def test_without_a_mask_an_encoder_reads_padding_as_in_transformers(engine: Engine) -> None:
    ids, mask = texts()
    wanted: Any = encoder_decoder("t5").generate(ids, do_sample=False, max_new_tokens=12)
    assert not torch.equal(wanted, continued(encoder_decoder("t5"), max_new_tokens=12))
    assert torch.equal(Generator(engine).generate(ids, max_new_tokens=12), wanted)
    assert torch.equal(Generator(engine).generate(input_ids=ids, max_new_tokens=12), wanted)
    named = {"input_ids": ids, "attention_mask": mask}
    given = generate(engine, ids, mask, max_new_tokens=8)
    assert (generate(engine, named, max_new_tokens=8) == given).all()


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
def test_each_part_has_its_own_weights(bundle: Path) -> None:
    sizes = [(bundle / name / "weights.safetensors").stat().st_size for name in ("", "encoder")]
    model = encoder_decoder("t5")
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    shared: Any = model.get_input_embeddings()
    assert sum(sizes) < whole + 4 * shared.weight.numel() + 2**15
    assert max(sizes) < 0.8 * whole


@pytest.mark.slow
def test_the_manifest_says_what_was_checked(engine: Engine) -> None:
    generation = engine.manifest.generation
    assert generation is not None
    assert (generation.encoder, generation.start_ids, generation.ending_ids) == (
        *("encoder", (1,)),
        (2,),
    )
    checked = generation.checked
    assert checked is not None
    assert (checked.prompts, checked.steps, checked.own) == (4, 64, "")
    assert 0 < checked.error <= 3 * checked.floor < 1e-5
    mask = read_encoded(engine.folder)["attention_mask"]
    assert sorted(mask.sum(-1).tolist()) == [1, 3, 5, 8]
    assert engine.manifest.symbols["past"] == (0, 95)


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


WRONG: dict[str, Change] = {
    "mask": lambda feeds: {"encoder_attention_mask": np.ones_like(feeds["encoder_attention_mask"])},
    "rows": lambda feeds: {
        name: feed[::-1].copy() for name, feed in feeds.items() if name.startswith("cross")
    },
    "layers": lambda feeds: {
        "cross_key_values_0_key": feeds["cross_key_values_1_key"],
        "cross_key_values_1_key": feeds["cross_key_values_0_key"],
    },
    "past": lambda feeds: {
        name: feed[:, :, ::-1].copy() for name, feed in feeds.items() if name.startswith("past")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_decoder_that_is_fed_wrongly_does_not_follow(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_continued(engine.folder)
    encoded, exact = read_encoded(engine.folder), follow(engine, model, read_encoded(engine.folder))
    assert exact.failures == ()
    feed_otherwise(monkeypatch, engine, WRONG[name])
    wrong = follow(engine, model, encoded)
    assert max(np.abs(a - b).max() for a, b in zip(exact.logits, wrong.logits, strict=True)) > 1e-2


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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "t5"])
def test_families_are_verified(name: str, tmp_path: Path) -> None:
    model = encoder_decoder(name)
    made = export(model, tmp_path / "bundle")
    sound = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = dict(zip(("input_ids", "attention_mask"), texts(), strict=True))
    if name == "whisper":
        given = {"input_features": sound}
    wanted: Any = model.generate(**given, max_new_tokens=24, do_sample=False)
    with enginecast.load(made.root) as engine:
        found = Generator(engine).generate(**given, max_new_tokens=24)
        whole = generate(engine, next(iter(given.values())), max_new_tokens=24)
    assert torch.equal(found, wanted)
    assert found.shape[1] == (24 if name == "whisper" else 25)  # Whisper's leaves its prompt out
    assert (whole[:, -24:] == found.numpy()[:, -24:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_families_are_verified(name: str, tmp_path: Path) -> None:
    made = export(encoder_decoder(name), tmp_path / "bundle")
    for each in (made, made.parts["encoder"]):
        assert each.manifest.engines[0].verdict.outcome == "verified"
    assert made.manifest.generation is not None
    assert made.manifest.generation.checked is not None


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_by_emulation(name: str, precision: str, tmp_path: Path) -> None:
    model = seeded(MODELS[name], 0, 0.08)  # of larger weights eager itself is off by all in fp16
    made = export(model, tmp_path / "bundle", precision=precision)
    for each in (made, made.parts["encoder"]):
        assert each.manifest.engines[0].verdict.outcome == "verified-by-emulation"
    assert made.manifest.generation is not None
    assert made.manifest.generation.checked is not None


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
