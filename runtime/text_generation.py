"""Text in, text out: prompts become tokens, and the tokens that an engine generates become text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
from tokenizers import Encoding, Tokenizer

from enginecast.errors import InputError, UsageError
from enginecast.installation import required
from enginecast.runtime.bundle.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
)
from enginecast.runtime.engine import Engine, require_known
from enginecast.runtime.generation import USUAL_TOP_K, Decoder, either, token_steps
from enginecast.runtime.prompts import (
    open_tokenizer,
    pad,
    refusing,
    require_texts,
    sizes_of,
    split,
)

USUAL_NEW_TOKENS = 256
"""What is generated at most where nobody says otherwise."""
OPTIONS = ("chat", *(token_steps.__kwdefaults__ or ()))
CONTEXT = 6
"""Tokens before the first new one that its text may depend on, such as for a space between."""
PART = "\ufffd"
"""What a text ends in that has only some of the bytes of a character."""


@dataclass(frozen=True)
class Completion:
    """What followed a prompt.

    Args:
        text: without the prompt.
        prompt_tokens: of the prompt.
        new_tokens: that were generated, with the one that ended the text.
        finish_reason: "stop": the model ended the text; "length": max_new_tokens did.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    finish_reason: Literal["stop", "length"]


class Row:
    """The text of one row, which grows by tokens.

    A token may be part of a character, and its text may depend on the token before it (that which
    begins a text of SentencePiece loses its space).  So what is new is the difference of two texts,
    of a few tokens before and of these with the new ones, once it ends in a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._known, self._new = [*before], list[int]()
        self._count, self._prompt_tokens = 0, prompt_tokens
        self.is_ended = False
        self.piece = ""
        """The text that the last call of `take` or `finish` added."""
        self.text = ""

    def take(self, token: int, endings: Sequence[int]) -> None:
        """The next token; those after the end are padding."""
        self.piece = ""
        if self.is_ended:
            return
        self._count += 1
        self.is_ended = token in endings
        if self.is_ended:
            self.finish()
            return
        self._new.append(token)
        self._add(whole=False)

    def finish(self) -> None:
        """Nothing comes after it: add what is left of a character, too."""
        self.piece = ""
        self._add(whole=True)

    def _add(self, *, whole: bool) -> None:
        before = self._tokenizer.decode(self._known)
        after = self._tokenizer.decode([*self._known, *self._new])
        if len(after) > len(before) and (whole or not after.endswith(PART)):
            self.piece = after[len(before) :]
            self.text += self.piece
            self._known, self._new = self._new, []

    def completion(self) -> Completion:
        reason: Literal["stop", "length"] = "stop" if self.is_ended else "length"
        return Completion(self.text, self._prompt_tokens, self._count, reason)


class TextGenerator:
    """Generates text with an engine and the tokenizer of its bundle; several threads may share one.

    Args:
        engine: of a bundle that was exported with `--kv-cache`.
        files: the bundle's files about its tokenizer, by name.

    Raises:
        UsageError: the engine generates no text, its bundle has no tokenizer, or its encoder reads
            something else than text.
        BundleError: the tokenizer is damaged.
    """

    def __init__(self, engine: Engine, files: Mapping[str, bytes]) -> None:
        decoder = Decoder(engine)
        self._engine, self.files, self._decoder = engine, files, decoder
        reader = engine if decoder.encoder is None else decoder.encoder
        ids = next((spec for spec in reader.inputs if spec.kind == "token_ids"), None)
        by_tokens = "Generate from arrays: enginecast.runtime.generate(engine, input_ids)."
        if ids is None:
            takes = reader.inputs[0].name
            raise UsageError(
                f"{engine.folder}: its encoder reads {takes}, not text", hint=by_tokens
            )
        if engine.manifest.text is None or TOKENIZER_NAME not in files:
            raise UsageError(
                f"{engine.folder}: the bundle has no tokenizer, expected {TOKENIZER_NAME}",
                hint=f"Put {TOKENIZER_NAME} into the model's folder and export it again."
                f" {by_tokens}",
            )
        self._text = reader.manifest.text or engine.manifest.text
        self._rows, (self._least, self._most) = sizes_of(reader.manifest, ids)
        self._step = reader.manifest.steps.get(str(ids.shape[1]), 1)
        self._path = engine.folder / TOKENIZER_NAME
        self._tokenizer = open_tokenizer(self._path, self._most, files[TOKENIZER_NAME])
        self._tokenizer.no_truncation()

    def complete(self, prompts: Sequence[str], **options: Any) -> list[Completion]:
        """What follows each of some prompts; they run together, as many as the engine takes."""
        require_known("generate", options, OPTIONS)
        encodings = self._encoded(prompts, chat=options.pop("chat", False))
        found = []
        seed = options.pop("seed", None)
        for index, chunk in enumerate(split(encodings, self._rows)):
            if seed is not None and index:  # each chunk draws numbers of its own
                seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
            *_, rows = self._run(chunk, seed=seed, **options)
            found += [row.completion() for row in rows]
        return found

    def stream(self, prompt: str, **options: Any) -> Iterator[str | Completion]:
        """What follows a prompt, piece by piece, and at last all of it."""
        require_known("stream", options, OPTIONS)
        encodings = self._encoded([prompt], chat=options.pop("chat", False))
        for (row,) in self._run(encodings, **options):
            if row.piece:
                yield row.piece
        yield row.completion()

    def _encoded(self, prompts: Sequence[str], *, chat: bool) -> list[Encoding]:
        texts = require_texts(prompts)
        if chat:
            texts = [self._chat(text) for text in texts]
        with refusing(f"{self._path}: cannot tokenize"):
            # The template of a chat has the special tokens itself.
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=not chat)
        for place, encoding in enumerate(encodings):
            count = len(encoding.ids)
            if not 1 <= count <= self._most:
                raise InputError(
                    f"prompts[{place}]: expected 1..{self._most} tokens, got {count}",
                    hint="" if count else "An empty prompt has no token to go on from.",
                )
        return encodings

    def _run(
        self, chunk: Sequence[Encoding], *, max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[list[Row]]:
        """The rows after each step, and once more at the end."""
        decoder, has_encoder = self._decoder, self._decoder.encoder is not None
        own, longest = decoder.generation, max(len(each.ids) for each in chunk)
        padding_id = own.padding_id if own.padding_id is not None else self._text.padding_id
        side: Literal["left", "right"] = self._text.padding_side if has_encoder else "left"
        least, step = (self._least, self._step) if has_encoder else (1, 1)
        arrays = pad(chunk, padding_id, least=least, step=step, side=side)
        if max_new_tokens is None:
            room = decoder.longest - (len(own.start_ids) if has_encoder else longest) + 1
            max_new_tokens = max(1, min(USUAL_NEW_TOKENS, room))
        ids, mask = arrays["token_ids"], arrays["attention_mask"]
        options = drawn(options, do_sample=own.do_sample, top_k=own.top_k)
        _, steps = token_steps(self._engine, ids, mask, max_new_tokens=max_new_tokens, **options)
        endings = either(options.get("eos_token_id"), own.ending_ids)
        rows = [
            Row(self._tokenizer, [] if has_encoder else each.ids[-CONTEXT:], len(each.ids))
            for each in chunk
        ]
        for tokens in steps:
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.take(token, endings)
            yield rows
        for row in rows:
            row.finish()
        yield rows

    def _chat(self, text: str) -> str:
        """The prompt of a chat whose first message this is, by the model's own template.

        Raises:
            UsageError: the bundle has no such template.
            BundleError: it cannot be rendered.
        """
        with required("jinja2", "a chat", "export"):
            from jinja2 import Environment, nodes
            from jinja2.ext import Extension
            from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """{% generation %}, which marks what a model said for training: what stands in it."""

            tags = {"generation"}  # noqa: RUF012 - of the base class, which declares it so

            def parse(self, parser: Any) -> list[nodes.Node]:
                next(parser.stream)
                inside: list[nodes.Node] = parser.parse_statements(
                    ("name:endgeneration",), drop_needle=True
                )
                return inside

        folder = self._engine.folder
        with refusing(f"{folder / TOKENIZER_CONFIG_NAME}: cannot be read"):
            config: dict[str, Any] = json.loads(self.files.get(TOKENIZER_CONFIG_NAME, b"{}"))
            template: Any = config.get("chat_template")
            if isinstance(template, list):  # several by name
                template = {each["name"]: each["template"] for each in template}.get("default")
            special = {
                name: value["content"] if isinstance(value, dict) else value
                for name, value in config.items()
                if name.endswith("_token") and value is not None
            }
        if CHAT_TEMPLATE_NAME in self.files:
            with refusing(f"{folder / CHAT_TEMPLATE_NAME}: cannot be read"):
                template = self.files[CHAT_TEMPLATE_NAME].decode()
        if not template:
            raise UsageError(
                f"{folder}: the model's tokenizer has no chat template",
                hint="Leave the chat out, and write the prompt as the model expects it.",
            )
        environment: Environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(
            value, **{"ensure_ascii": False, **how}
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        with refusing(f"{folder}: its chat template cannot be rendered"):
            return environment.from_string(template).render(
                messages=[{"role": "user", "content": text}], add_generation_prompt=True, **special
            )


def _raise(message: str) -> None:
    """What templates call to refuse a chat."""
    raise ValueError(message)


def drawn(options: Mapping[str, Any], *, do_sample: bool, top_k: int | None) -> dict[str, Any]:
    """Options of `token_steps`, of which those that only matter where tokens are drawn say that
    they are.

    Args:
        options: a temperature of 0 is the token with the highest score.
        do_sample, top_k: of the model's generation config.
    """
    found = {name: value for name, value in options.items() if value is not None}
    asks = any(name in found for name in ("temperature", "top_k", "top_p"))
    if found.get("temperature") == 0:
        del found["temperature"]
        found["do_sample"] = False
    found.setdefault("do_sample", asks or do_sample)
    if found["do_sample"] and top_k is None:
        found.setdefault("top_k", USUAL_TOP_K)
    return found
