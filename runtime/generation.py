"""Generating text with an engine that is a step of a language model: numpy alone, no torch.

The engine reads a prompt in one call, and then a token in each, with the keys and values of all
tokens before as inputs.  Greedy decoding gives the tokens of transformers' `generate`, and sampling
draws from the same probabilities.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginecast.errors import InputError, UsageError
from enginecast.runtime.bundle.manifest import Generation, Input
from enginecast.runtime.engine import Engine
from enginecast.runtime.values.arrays import BFLOAT16, Array, to_array

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]

IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
USUAL_TOP_K = 50
"""What transformers samples from where nobody says otherwise."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from scores, in the order in which transformers applies it.

    Args:
        do_sample: draw; False: take the token with the highest score.
        temperature: divides the scores.
        top_k: draw from so many tokens with the highest scores; None: from all.
        top_p: draw from the fewest tokens whose probabilities add up to it.
        repetition_penalty: divides positive scores of tokens that the row has, and multiplies
            negative ones.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"temperature: expected more than 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k: expected at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        if not self.repetition_penalty > 0:
            penalty = self.repetition_penalty
            raise UsageError(f"repetition_penalty: expected more than 0, got {penalty}")

    def scores(self, ids: Ids, logits: Scores) -> Scores:
        """The scores that tokens are chosen by.

        Args:
            ids: of the prompt and what was generated, [batch, tokens].
            logits: of the next token, [batch, vocabulary].
        """
        if self.repetition_penalty != 1.0:
            logits = penalized(logits, ids, self.repetition_penalty)
        if not self.do_sample:
            return logits
        if self.temperature != 1.0:
            logits = logits / np.float32(self.temperature)
        if self.top_k is not None:
            logits = only_top_k(logits, self.top_k)
        return only_top_p(logits, self.top_p) if self.top_p < 1.0 else logits

    def choose(self, ids: Ids, logits: Scores, random: np.random.Generator) -> Ids:
        """The next token of each row, [batch]."""
        scores = self.scores(ids, logits)
        if not self.do_sample:
            return np.asarray(scores.argmax(-1), np.int64)
        cumulative = softmax(scores.astype(np.float64)).cumsum(-1)
        drawn = random.random(len(scores))[:, None] * cumulative[:, -1:]
        return np.asarray((cumulative <= drawn).sum(-1), np.int64)


def penalized(logits: Scores, ids: Ids, penalty: float) -> Scores:
    """The logits [batch, vocabulary], with those of tokens in `ids` [batch, tokens] nearer to 0
    where they are positive, and farther off where they are negative; for a penalty above 1.
    """
    found = np.take_along_axis(logits, ids, -1)
    factor = np.float32(penalty)
    changed = np.where(found < 0, found * factor, found / factor)
    penalized = logits.copy()
    np.put_along_axis(penalized, ids, changed, -1)
    return penalized


def only_top_k(logits: Scores, count: int) -> Scores:
    """The logits [batch, vocabulary], minus infinity below the `count` highest of each row."""
    count = min(count, logits.shape[-1])
    least = np.partition(logits, -count, axis=-1)[:, -count][:, None]
    return np.where(logits < least, np.float32(-np.inf), logits)


def only_top_p(logits: Scores, part: float) -> Scores:
    """The logits [batch, vocabulary], minus infinity but for the fewest of each row whose
    probabilities add up to `part`, and one at least.
    """
    order = logits.argsort(-1, kind="stable")
    ascending = np.take_along_axis(logits, order, -1)
    removed = softmax(ascending).cumsum(-1) <= np.float32(1 - part)
    removed[:, -1:] = False
    dropped = np.empty_like(removed)
    np.put_along_axis(dropped, order, removed, -1)
    return np.where(dropped, np.float32(-np.inf), logits)


def softmax(scores: NDArray[Any]) -> NDArray[Any]:
    """Probabilities along the last axis, in the dtype of the scores."""
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


class Decoder:
    """The state of one run of a language model: what its engine is fed from call to call.

    Args:
        engine: of a bundle that was exported with `--task text-generation`.

    Raises:
        UsageError: the bundle is none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.generation = generation_of(engine)
        self._inputs = {spec.name: spec for spec in engine.inputs}
        self._states = {state.input: state.output for state in engine.manifest.states}
        self._ids: Ids = np.zeros((0, 0), np.int64)
        self._mask: Ids = np.zeros((0, 0), np.int64)
        self._positions: Ids = np.zeros((0, 0), np.int64)
        self._past: dict[str, Array] = {}

    @property
    def longest(self) -> int:
        """Tokens that a row may have in all."""
        return self.engine.manifest.symbols[str(self._inputs[MASK].shape[1])][1]

    def start(self, ids: Ids, mask: Ids) -> Scores:
        """Read prompts.

        Args:
            ids: int64 [batch, tokens], padded on the left.
            mask: int64 [batch, tokens], 0 where there is padding.

        Returns:
            The logits of the next token, float32 [batch, vocabulary].

        Raises:
            EnginecastError: as `Engine.run`.
        """
        self._ids, self._mask = ids, mask
        self._positions = np.where(mask == 0, 0, mask.cumsum(-1) - 1)
        self._past = {
            name: np.zeros(_empty(self._inputs[name], len(ids)), _dtype(self._inputs[name]))
            for name in self._states
        }
        return self._run(ids, self._positions)

    def step(self, tokens: Ids) -> Scores:
        """Go on by a token in each row.

        Args:
            tokens: int64 [batch].

        Returns:
            The logits of the token that comes after it, float32 [batch, vocabulary].

        Raises:
            EnginecastError: as `Engine.run`.
        """
        before = self._ids.shape[1]
        self._ids = np.concatenate([self._ids, tokens[:, None]], -1)
        self._mask = np.concatenate([self._mask, np.ones_like(tokens)[:, None]], -1)
        if before in self.generation.restarts:
            return self.start(self._ids, self._mask)
        self._positions = self._positions[:, -1:] + 1
        return self._run(tokens[:, None], self._positions)

    def _run(self, ids: Ids, positions: Ids) -> Scores:
        feeds: dict[str, Array] = {IDS: ids, MASK: self._mask, **self._past}
        if POSITIONS in self._inputs:
            feeds[POSITIONS] = positions
        outputs = self.engine.run({n: np.ascontiguousarray(feed) for n, feed in feeds.items()})
        self._past = {
            name: outputs[output].astype(_dtype(self._inputs[name]), copy=False)
            for name, output in self._states.items()
        }
        return np.asarray(outputs[LOGITS][:, -1], np.float32)


def generation_of(engine: Engine) -> Generation:
    """What a bundle says of text generation.

    Raises:
        UsageError: its engine does not generate text.
    """
    found = engine.manifest.generation
    if found is None:
        raise UsageError(
            f"{engine.folder}: the engine does not generate text",
            hint="Export the model with --task text-generation.",
        )
    return found


def generate(
    engine: Engine,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> Ids:
    """Generate text: prompts and what follows them.

    Args:
        engine: of a bundle that was exported with `--task text-generation`.
        input_ids: the prompts, int64 [batch, tokens], padded on the left.
        attention_mask: [batch, tokens], 0 where there is padding; None: as transformers, padding
            is where the padding id is, unless a text may end with it.
        max_new_tokens: at most.
        eos_token_id: ends a row; None: those of the model's generation config; (): none.
        pad_token_id: follows in a row that has ended; None: that of this config, or else the first
            id that ends a row.
        do_sample: draw the next token; False: take the one with the highest score.
        temperature: divides the scores; None, here and below: that of this config.
        top_k: draw from so many tokens with the highest scores; 0: from all.
        top_p: draw from the fewest tokens whose probabilities add up to it.
        repetition_penalty: divides positive scores of tokens that the row has, and multiplies
            negative ones.
        seed: of what is drawn; None: another one in each call.

    Returns:
        int64 [batch, tokens + new tokens].

    Raises:
        InputError: the prompts do not fit the engine.
        UsageError: the engine does not generate text, or a number is out of range.
        EnginecastError: as `Engine.run`.
    """
    ids = _ids("input_ids", input_ids)
    own = generation_of(engine)
    sampling = Sampling(
        do_sample,
        own.temperature if temperature is None else temperature,
        (own.top_k if top_k is None else top_k) or None,
        own.top_p if top_p is None else top_p,
        own.repetition_penalty if repetition_penalty is None else repetition_penalty,
    )
    new = tokens(
        engine,
        ids,
        attention_mask,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        sampling=sampling,
        seed=seed,
    )
    return np.concatenate([ids, *(each[:, None] for each in new)], -1)


def tokens(
    engine: Engine,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    sampling: Sampling | None = None,
    seed: int | None = None,
) -> Iterator[Ids]:
    """Generate text token by token; arguments and errors are those of `generate`.

    Args:
        sampling: how tokens are chosen; None: by the highest score, with the repetition penalty of
            the model's generation config.

    Yields:
        The next token of each row, int64 [batch].
    """
    decoder = Decoder(engine)
    if sampling is None:
        sampling = Sampling(repetition_penalty=decoder.generation.repetition_penalty)
    ids = _ids("input_ids", input_ids)
    endings = _endings(decoder.generation, eos_token_id)
    padding = decoder.generation.padding_id if pad_token_id is None else pad_token_id
    mask = _mask(ids, attention_mask, padding, endings)
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if ids.shape[1] + max_new_tokens - 1 > decoder.longest:
        most = max(0, decoder.longest - ids.shape[1] + 1)
        raise InputError(
            f"input_ids: expected prompts that leave room for {max_new_tokens} new tokens, got"
            f" {ids.shape[1]} tokens of {decoder.longest} that the engine takes",
            hint=f"Ask for max_new_tokens={most}." if most else "Give shorter prompts.",
        )
    if seed is not None and seed < 0:
        raise UsageError(f"seed: expected at least 0, got {seed}")
    random = np.random.default_rng(seed)
    running = np.ones(len(ids), np.bool_)
    filler = padding if padding is not None else next(iter(endings), 0)
    logits = decoder.start(ids, mask)
    for step in range(max_new_tokens):
        found = np.where(running, sampling.choose(ids, logits, random), filler)
        yield found
        running &= ~np.isin(found, endings)
        if step + 1 == max_new_tokens or not running.any():
            return
        ids = np.concatenate([ids, found[:, None]], -1)
        logits = decoder.step(found)


def _ids(name: str, value: Any) -> Ids:
    try:
        found = to_array(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InputError(f"{name}: expected an array of integers, got {error}") from error
    if found.ndim != 2 or found.dtype.kind not in "iub" or not found.size:
        raise InputError(
            f"{name}: expected integers [batch, tokens], one token at least, got {found.dtype}"
            f" {list(found.shape)}"
        )
    return found.astype(np.int64)


def _mask(ids: Ids, given: Any, padding: int | None, endings: Sequence[int]) -> Ids:
    """The mask of prompts, as transformers infers it where none is given."""
    if given is not None:
        mask = _ids("attention_mask", given)
        if mask.shape != ids.shape:
            raise InputError(
                f"attention_mask: expected shape {list(ids.shape)}, got {list(mask.shape)}"
            )
        if not np.isin(mask, (0, 1)).all():
            other = mask[~np.isin(mask, (0, 1))][0]
            raise InputError(f"attention_mask: expected 0 and 1 alone, got {other}")
    elif padding is None or padding in endings:
        return np.ones_like(ids)
    else:
        mask = (ids != padding).astype(np.int64)
    if not mask[:, -1].all():
        row = int((mask[:, -1] == 0).argmax())
        raise InputError(
            f"input_ids: expected padding on the left, got a row {row} that ends in padding",
            hint="Set padding_side='left' where the prompts are tokenized.",
        )
    return mask


def _endings(generation: Generation, given: int | Sequence[int] | None) -> Sequence[int]:
    if given is None:
        return generation.ending_ids
    return tuple(np.atleast_1d(np.asarray(given, np.int64)).tolist())


def _empty(spec: Input, batch: int) -> tuple[int, ...]:
    """The shape of keys or values of no token: the batch first, then heads, tokens and width."""
    return (batch, *(size if isinstance(size, int) else 0 for size in spec.shape[1:]))


def _dtype(spec: Input) -> np.dtype[Any]:
    return BFLOAT16 if spec.dtype == "bfloat16" else np.dtype(spec.dtype)


TAKEN = (
    "max_new_tokens",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
)
"""What of transformers' GenerationConfig is heeded."""
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "num_beam_groups": (1, None),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "no_repeat_ngram_size": (0, None),
    "encoder_no_repeat_ngram_size": (0, None),
    "min_p": (0, 0.0, None),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "length_penalty": (1.0, None),
    "encoder_repetition_penalty": (1.0, None),
    "diversity_penalty": (0.0, None),
    "guidance_scale": (1.0, None),
    "remove_invalid_values": (False, None),
    "token_healing": (False, None),
    "use_cache": (True, None),
}
"""Values of other arguments that change nothing."""
CHANGES = (
    *(name for name in WITHOUT_EFFECT if name != "use_cache"),
    *("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
    *("begin_suppress_tokens", "sequence_bias", "constraints", "force_words_ids", "stop_strings"),
    *("penalty_alpha", "assistant_model", "prompt_lookup_num_tokens", "max_time", "top_h"),
    *("exponential_decay_length_penalty", "watermarking_config", "dola_layers"),
)
"""Fields of a GenerationConfig that change the tokens, and are not heeded."""


class Generator:
    """Stands in for a model of transformers where its `generate` is called.

    It takes and returns tensors of torch where it is given such, and numpy arrays else.

    Args:
        engine: of a bundle that was exported with `--task text-generation`.
    """

    def __init__(self, engine: Engine) -> None:
        generation_of(engine)
        self.engine = engine

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> Any:
        """Generate text as `model.generate` does.

        Args:
            inputs: the prompts, int64 [batch, tokens], padded on the left.
            input_ids: the same, by name.
            generation_config: a GenerationConfig; `options` come before it.
            attention_mask: [batch, tokens].
            seed: of what is drawn: the random numbers are not those of torch.
            **options: max_new_tokens or max_length, eos_token_id, pad_token_id, do_sample,
                temperature, top_k, top_p and repetition_penalty.  What nobody gives is that of the
                model's generation config, but for lengths.

        Returns:
            The prompts and what follows them, int64 [batch, tokens + new tokens].

        Raises:
            UsageError: an argument, or a field of the model's generation config, that would
                change the tokens, and is not heeded here.
            EnginecastError: as the function `generate`.
        """
        given = inputs if input_ids is None else input_ids
        if given is None or (inputs is not None and input_ids is not None):
            raise UsageError("generate: expected prompts once, as input_ids")
        ids = _ids("input_ids", given)
        own = generation_of(self.engine)
        asked = _asked(generation_config) | options
        kept = [name for name in own.not_heeded if name not in asked]
        if kept:
            raise UsageError(
                f"generate: the model's generation config sets {kept[0]}, which an engine does not"
                " heed",
                hint=f"Give {kept[0]}=None to generate without it.",
            )
        longest = asked.pop("max_length", None)
        if asked.get("max_new_tokens") is None:
            asked["max_new_tokens"] = 20 if longest is None else longest - ids.shape[1]
        for name, value in [*asked.items()]:
            if name not in TAKEN:
                if _changes(name, value):
                    raise UsageError(f"generate: {name}={value!r} is not heeded by an engine")
                del asked[name]
        asked.setdefault("do_sample", own.do_sample)
        if asked["do_sample"]:
            asked.setdefault("top_k", USUAL_TOP_K if own.top_k is None else own.top_k)
            asked["top_k"] = asked["top_k"] or 0
        given_options = {name: value for name, value in asked.items() if value is not None}
        found = generate(self.engine, ids, attention_mask, seed=seed, **given_options)
        like = getattr(given, "new_tensor", None)  # torch's, which is not imported here
        return found if like is None else like(found)


def _changes(name: str, value: Any) -> bool:
    """Whether a value of what is not heeded would change the tokens."""
    if value is None or (isinstance(value, (list, tuple, dict)) and not value):
        return False
    return value not in WITHOUT_EFFECT.get(name, ())


def not_heeded(config: Any) -> tuple[str, ...]:
    """The fields of a GenerationConfig that would change the tokens, and are not heeded."""
    return tuple(name for name in CHANGES if _changes(name, getattr(config, name, None)))


def _asked(config: Any) -> dict[str, Any]:
    """What a GenerationConfig asks for."""
    if config is None:
        return {}
    found = {name: getattr(config, name, None) for name in (*TAKEN, "max_length", *CHANGES)}
    return {name: value for name, value in found.items() if value is not None}
