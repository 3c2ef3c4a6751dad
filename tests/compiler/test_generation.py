"""Language models as steps of generate: what is verified, refused, and generated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
import transformers
from decoders import decoder
from doc_examples import run_example
from exports import Exports, cast
from generating import TASK, Change, export, feed_otherwise, save_with_tokenizer
from mutations import edit_graph, outcome
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    ProphetNetConfig,
    ProphetNetForCausalLM,
)
from transformers.generation import logits_process as reference

import enginecast
from enginecast.capture.sources.factory import take_module
from enginecast.capture.sources.generation import decoder as decoder_source
from enginecast.capture.sources.generation.decoder import as_decoder
from enginecast.compiler.request import ExportRequest
from enginecast.errors import (
    BundleError,
    EnginecastWarning,
    InputError,
    SourceError,
    UsageError,
    VerificationError,
)
from enginecast.runtime import Generator, generate
from enginecast.runtime.bundle.manifest import CHAT_TEMPLATE_NAME
from enginecast.runtime.engine import Engine
from enginecast.runtime.generation import (
    not_heeded,
    only_top_k,
    only_top_p,
    penalized,
)
from enginecast.runtime.text_generation import TextGenerator
from enginecast.verification.generation import follow, read_continued


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_with_tokenizer(decoder("llama"), folder / "model")
    return export(str(folder / "model"), folder / "bundle").root


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with enginecast.load(bundle) as engine:
        yield engine


def test_the_examples_run(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama", "gpt"):
        (tmp_path / f"{name}.bundle").symlink_to(bundle)
    monkeypatch.chdir(tmp_path)
    run_example(Engine.generate, "Engine.generate")
    run_example(Engine.stream, "Engine.stream")
    run_example(generate, "generate")
    run_example(Generator, "Generator")


def test_texts_go_in_and_out_as_in_transformers(
    bundle: Path, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundle.with_name("model"))
    texts, few = ["a red fox", "two cats sleep on the lazy dog"], {"max_new_tokens": 24}
    model = decoder("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2)

    def followed(**given: Any) -> list[str]:
        tokens: Any = model.generate(**given, do_sample=False, **few)
        whole = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        read = tokenizer.batch_decode(given["input_ids"], skip_special_tokens=True)
        return [text[len(before) :] for text, before in zip(whole, read, strict=True)]

    encoded = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    wanted = followed(**encoded)
    assert engine.generate(texts, **few) == wanted
    pieces = list(engine.stream(texts[0], **few))
    assert ("".join(pieces), engine.generate(texts[0], **few)) == (wanted[0], wanted[0])
    assert len(pieces) > 4
    asked = [{"role": "user", "content": texts[0]}]
    chat = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert engine.generate(texts[0], chat=True, **few) == followed(**chat)[0] != wanted[0]
    hot = {"temperature": 3.0, "top_k": 0, **few}
    assert engine.generate(texts[0], seed=3, **hot) == engine.generate(texts[0], seed=3, **hot)
    assert engine.generate(texts[0], seed=3, **hot) != engine.generate(texts[0], seed=4, **hot)
    assert engine.generate(texts[0], temperature=0.0, **few) == wanted[0]

    one = ("generate", bundle, "--prompt", texts[0], "--max-new-tokens", 24)
    ran = cast(capsys, *one)
    assert (ran.code, ran.out) == (0, f"{wanted[0]}\n")
    assert " tokens, " in ran.err
    assert "1 of 1 cut at --max-new-tokens" in cast(capsys, *one[:-1], 4).err
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    several = ("generate", bundle, "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 24)
    assert cast(capsys, *several).out.startswith(f"> {texts[0]}\n{wanted[0]}\n\n> {texts[1]}\n")
    content = cast(capsys, *several, "--json").json
    assert [(each["prompt"], each["text"]) for each in content["completions"]] == [
        *zip(texts, wanted, strict=True)
    ]
    assert content["completions"][0]["finish_reason"] == "stop"


def test_texts_that_do_not_fit_are_refused(
    engine: Engine, exports: Exports, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="leave room for 127 new tokens"):
        engine.generate("a red fox", max_new_tokens=127)
    with pytest.raises(InputError, match=r"prompts\[1\]: expected 1\.\.128 tokens, got "):
        engine.generate(["a", "fox " * 128])
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (5, {}, "prompts: expected a str or several, got int"),
        ("a", {"num_beams": 4}, "generate: 'num_beams' is no option; expected chat, "),
        ("a", {"temperature": "hot"}, "generate: temperature: expected a number, got 'hot'"),
        ("a", {"max_new_tokens": 2.5}, "max_new_tokens: expected an integer, got 2.5"),
    ]
    for prompt, options, said in wrong:
        with pytest.raises((InputError, UsageError), match=said):
            engine.generate(prompt, **options)
    text = engine.generate("a red fox")
    assert text == engine.generate("a red fox", max_new_tokens=120)  # as many as fit
    many = engine.generate(["the"] * 66, temperature=9.0, seed=1, max_new_tokens=6)
    assert many[:33] != many[33:]  # in two batches
    files = engine.text_generator.files
    marked = b"{% generation %}{{ messages[0].content }}{% endgeneration %}"
    assert TextGenerator(engine, {**files, CHAT_TEMPLATE_NAME: marked})._chat("hi") == "hi"
    with pytest.raises(BundleError, match=r"chat_template\.jinja: cannot be read"):
        TextGenerator(engine, {**files, CHAT_TEMPLATE_NAME: b"\xff"})._chat("hi")
    with pytest.raises(UsageError, match="the bundle has no tokenizer"):
        TextGenerator(engine, {})
    with pytest.raises(UsageError, match="the model's tokenizer has no chat template"):
        TextGenerator(engine, {**engine.text_generator.files, CHAT_TEMPLATE_NAME: b""}).complete(
            ["a"], chat=True
        )
    ran = cast(capsys, "generate", exports("t5").folder, "--prompt", "a")
    assert ran.code == 2
    assert "the engine does not generate text" in ran.err
    assert "--kv-cache" in ran.err


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts, padded on the left."""
    ids = torch.randint(3, 99, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :5] = 0, 0
    return ids * mask, mask


def continued(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    ids, mask = prompts()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2)
    found: Any = model.generate(ids, attention_mask=mask, do_sample=False, **options)
    return torch.as_tensor(found)


MANY_ENDS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": list(range(2, 20))}
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 24},
    {"max_new_tokens": 24, "repetition_penalty": 0.2},
    MANY_ENDS,
]


@pytest.mark.parametrize("options", OPTIONS)
def test_greedy_is_that_of_transformers(engine: Engine, options: dict[str, Any]) -> None:
    ids, mask = prompts()
    found = Generator(engine).generate(ids, attention_mask=mask, **options)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, continued(decoder("llama"), **options))


def test_a_static_cache_gives_the_same_tokens(engine: Engine) -> None:
    ids, mask = prompts()
    model = decoder("llama")
    model.generation_config = GenerationConfig(
        pad_token_id=0, eos_token_id=2, cache_implementation="static"
    )
    assert not_heeded(model.generation_config) == ()
    wanted: Any = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    found = Generator(engine).generate(ids, attention_mask=mask, max_new_tokens=24)
    assert torch.equal(found, wanted)


def test_drawing_follows_the_seed_and_the_probabilities(engine: Engine) -> None:
    ids, mask = (tensor.numpy() for tensor in prompts())
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 8}
    one, same, other = (generate(engine, ids, mask, **options, seed=s) for s in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()
    best = generate(engine, ids, mask, do_sample=True, top_k=1, max_new_tokens=8)
    assert (best == generate(engine, ids, mask, max_new_tokens=8)).all()
    rows = np.repeat(ids[:1], 64, 0)
    hot: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 1, "top_k": 0}
    drawn = np.concatenate([generate(engine, rows, **hot, seed=s)[:, -1] for s in range(40)])
    model = decoder("llama")
    with torch.no_grad():
        logits = model(torch.from_numpy(ids[:1])).logits[0, -1]
    wanted = (logits / 2).softmax(-1).numpy()
    share = np.bincount(drawn, minlength=99) / len(drawn)
    assert np.abs(share - wanted).max() < 4 * np.sqrt(0.25 / len(drawn))


@pytest.mark.parametrize("seed", range(5))
def test_the_filters_are_those_of_transformers(seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(4, 1000), scale=4).astype(np.float32)
    logits[0, :500] = logits[0, 500:]  # equal ones
    ids = random.integers(0, 1000, (4, 30))
    scores, known = torch.from_numpy(logits), torch.from_numpy(ids)
    pairs: list[tuple[Any, np.ndarray[Any, Any]]] = [
        (reference.TopKLogitsWarper(20), only_top_k(logits, 20)),
        (reference.TopKLogitsWarper(5000), only_top_k(logits, 5000)),
        (reference.TopPLogitsWarper(0.9), only_top_p(logits[1:], 0.9)),
        (reference.TopPLogitsWarper(0.01), only_top_p(logits[1:], 0.01)),
        (reference.RepetitionPenaltyLogitsProcessor(1.7), penalized(logits, ids, 1.7)),
    ]
    for filtered, found in pairs:
        rows = slice(len(logits) - len(found), None)
        wanted = filtered(known[rows], scores[rows].clone()).numpy()
        np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_generate_heeds_what_the_model_asks_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts()
    model = decoder("llama")
    own = {"eos_token_id": [2, *range(5, 30)], "pad_token_id": 3, "repetition_penalty": 1.5}
    model.generation_config = GenerationConfig(**own)
    wanted: Any = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    generation = engine.manifest.generation
    assert generation is not None
    kept = msgspec.structs.replace(
        generation,
        ending_ids=(2, *range(5, 30)),
        padding_id=3,
        repetition_penalty=1.5,
        do_sample=True,
        top_k=1,
    )
    manifest = msgspec.structs.replace(engine.manifest, generation=kept)
    monkeypatch.setattr(type(engine), "manifest", manifest)
    found = generate(engine, ids.numpy(), mask.numpy(), max_new_tokens=12)
    assert (found == wanted.numpy()).all()
    drawn = Generator(engine).generate(ids, attention_mask=mask, max_new_tokens=12)
    assert torch.equal(drawn, wanted)
    monkeypatch.setattr(
        type(engine),
        "manifest",
        msgspec.structs.replace(
            manifest, generation=msgspec.structs.replace(kept, not_heeded=("bad_words_ids",))
        ),
    )
    with pytest.raises(UsageError, match="sets bad_words_ids, which an engine does not heed"):
        Generator(engine).generate(ids, attention_mask=mask)
    Generator(engine).generate(ids, attention_mask=mask, bad_words_ids=None, max_new_tokens=1)
    with pytest.warns(EnginecastWarning, match="sets bad_words_ids, which an engine does not heed"):
        found = generate(engine, ids.numpy(), mask.numpy(), max_new_tokens=12)
    assert (found == wanted.numpy()).all()
    quiet: dict[str, Any] = {"max_new_tokens": 12, "ignore": ("bad_words_ids",)}
    found = generate(engine, ids.numpy(), mask.numpy(), **quiet)
    assert (found == wanted.numpy()).all()


def test_what_is_not_heeded_is_refused(engine: Engine) -> None:
    ids, _ = prompts()
    with pytest.raises(UsageError, match="num_beams=4 is not heeded"):
        Generator(engine).generate(ids, num_beams=4)
    with pytest.raises(UsageError, match="no_repeat_ngram_size=2 is not heeded"):
        Generator(engine).generate(ids, GenerationConfig(no_repeat_ngram_size=2))
    with pytest.raises(UsageError, match="exponential_decay_length_penalty="):
        Generator(engine).generate(
            ids, GenerationConfig(exponential_decay_length_penalty=(2, 3.0), eos_token_id=2)
        )
    with pytest.raises(UsageError, match="seed: expected at least 0, got -1"):
        generate(engine, ids, do_sample=True, seed=-1)
    with pytest.raises(UsageError, match="top_p: expected more than 0 and at most 1"):
        generate(engine, ids, top_p=1.5)


def test_prompts_that_do_not_fit_are_refused(engine: Engine) -> None:
    ids, mask = prompts()
    with pytest.raises(InputError, match="expected padding on the left, got a row 1"):
        generate(engine, ids, mask.flip(1))
    with pytest.raises(InputError, match="leave room for 124 new tokens, got 6 tokens of 128"):
        generate(engine, ids, mask, max_new_tokens=124)
    with pytest.raises(InputError, match="expected integers"):
        generate(engine, ids.float())


def present_of(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """The nodes that give the cache, by output."""
    return {name: node for node in graph.node for name in node.output if "present" in name}


@pytest.mark.parametrize("what", ["past", "mask", "groups"])
def test_an_engine_whose_attention_reads_otherwise_is_rejected(
    bundle: Path, tmp_path: Path, what: str
) -> None:
    def edit(graph: onnx.GraphProto) -> None:
        node = present_of(graph)["present.1.key"]
        if what == "past":
            node.input[5] = "past_key_values_0_value"
        elif what == "mask":
            node.input[3] = ""
        else:  # the tokens of a group in another order than those of its mask
            (joined,) = [n for n, one in enumerate(graph.node) if node.input[3] in one.output]
            axes = {"perm": [0, 1, 3, 2, 4]}
            source = graph.node[joined].input[0]
            turned = onnx.helper.make_node("Transpose", [source], ["mutated"], **axes)
            graph.node[joined].input[0] = "mutated"
            graph.node.insert(joined, turned)

    assert outcome(bundle, tmp_path, lambda copy: edit_graph(copy, edit)) == "rejected"


WRONG: dict[str, Change] = {
    "mask": lambda feeds: {"attention_mask": np.ones_like(feeds["attention_mask"])},
    "positions": lambda feeds: {"position_ids": np.minimum(feeds["position_ids"] + 1, 127)},
    "order": lambda feeds: {
        name: feed[:, :, ::-1].copy() for name, feed in feeds.items() if name.startswith("past")
    },
    "layers": lambda feeds: {
        "past_key_values_0_key": feeds["past_key_values_1_key"],
        "past_key_values_1_key": feeds["past_key_values_0_key"],
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_is_fed_wrongly_does_not_follow(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_continued(engine.folder)
    assert follow(engine, model).failures == ()
    if name == "positions":  # rotary positions are relative: all may be one off, but not some
        change: Change = lambda feeds: {  # noqa: E731
            "position_ids": feeds["position_ids"] + (feeds["position_ids"].shape[1] == 1)
        }
    else:
        change = WRONG[name]
    feed_otherwise(monkeypatch, engine, change)
    assert follow(engine, model).failures[0].startswith("generating: step ")


def test_verify_follows_again(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cast(capsys, "verify", bundle, "--json").json["outcome"] == "verified"
    found = cast(capsys, "inspect", bundle, "--json").json
    assert found["generation"]["checked"]["steps"] == 64


def refused(model: Any, kind: type[Exception], text: str, **more: Any) -> None:
    with pytest.raises(kind, match=text):
        as_decoder(take_module(model, more.pop("example", {})), "text-generation").layers  # noqa: B018


def test_models_that_are_no_decoders_are_refused() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
    refused(mamba, SourceError, r"layer 0 keeps a state of its own \(Linear")
    of_one = ProphetNetConfig(
        **{"vocab_size": 9, "hidden_size": 8, "decoder_ffn_dim": 8, "num_decoder_layers": 1},
        **{"num_decoder_attention_heads": 2, "is_encoder_decoder": False},
        **{"is_decoder": True, "add_cross_attention": False},
    )
    text = "expected a model that reads several tokens after those in its cache, got AssertionError"
    refused(ProphetNetForCausalLM(of_one).eval(), SourceError, text)
    refused(torch.nn.Linear(2, 2), UsageError, "expected a model of transformers with generate")
    refused(
        decoder("llama"), UsageError, "comes with example", example={"input_ids": torch.ones(1, 2)}
    )
    for more in ({"precision": "int8"}, {"target": "torchscript"}):
        with pytest.raises(UsageError, match="--kv-cache does not"):
            ExportRequest("model", "out", options=TASK, **more).resolve()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["FalconH1", "Jamba", "Qwen3Next", "Bamba", "RecurrentGemma"])
def test_a_hybrid_cache_is_named_and_refused(name: str) -> None:
    config = getattr(transformers, f"{name}Config")()  # no model is made
    with pytest.raises(SourceError, match="test: layer 0 keeps a state of its own") as caught:
        decoder_source.require_keys_and_values("test", config, "Leave --kv-cache out.")
    assert "IndexError" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["positions", "mask", "cache"])
def test_a_wrong_step_is_rejected(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured, and eager beside it, are both wrong: generate alone tells."""
    plain = decoder_source.DecoderSource._stepping

    def stepping(source: Any, module: torch.nn.Module) -> torch.nn.Module:
        stepped = plain(source, module)
        forward: Any = stepped.forward

        def wrongly(*args: Any, **tensors: Any) -> Any:
            if args or "attention_mask" not in tensors or len(tensors) < 4:
                return forward(*args, **tensors)
            if wrong == "positions":
                tensors["position_ids"] = (tensors["position_ids"] - 1).clamp(min=0)
            elif wrong == "mask":
                tensors["attention_mask"] = torch.ones_like(tensors["attention_mask"])
            found = forward(**tensors)
            if wrong == "cache":  # not the keys of the last token, but those before once more
                kept = found["present"][0]["key"]
                found["present"][0]["key"] = torch.cat([kept[:, :, :1], kept[:, :, :-1]], 2)
            return found

        wrongly.__signature__ = forward.__signature__  # type: ignore[attr-defined]
        wrongly.__wrapped__ = forward  # type: ignore[attr-defined]
        stepped.forward = wrongly
        return stepped

    monkeypatch.setattr(decoder_source.DecoderSource, "_stepping", stepping)
    with pytest.raises(VerificationError, match="generating: "):
        export(decoder("gpt2"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
