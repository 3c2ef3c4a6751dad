"""Generating text with an engine that is a step of a language model: numpy alone, no torch.

The engine reads a prompt in one call, and then a token in each, with the keys and values of all
tokens before as inputs.  Greedy decoding gives the tokens of transformers' `generate`, and sampling
draws from the same probabilities.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginecast.errors import EnginecastWarning, InputError, UsageError
from enginecast.runtime.bundle.manifest import Generation
from enginecast.runtime.engine import Engine
from enginecast.runtime.values.arrays import Array, to_array

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]

IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
DECODER, ENCODER_MASK = "decoder_", "encoder_attention_mask"
"""What the inputs of new tokens begin with where an encoder reads a text, too; and its mask, as the
decoder takes it."""
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
        repetition_penalty: divides positive scores of tokens that the row has, padding before it
            aside, and multiplies negative ones.
        suppress_tokens: never chosen.
        begin_suppress_tokens: not chosen as the first new token.
        forced_bos_token_id: follows a prompt of one token.
        forced_eos_token_id: one of these is the last token that may be generated.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()

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
        first = () if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        forced = {"forced_bos_token_id": first, "forced_eos_token_id": self.forced_eos_token_id}
        for name, ids in forced.items():
            if ids and {*ids} <= {*self.suppress_tokens}:
                which = ", ".join(map(str, ids))
                raise UsageError(f"{name}: expected an id that is not suppressed, too, got {which}")

    def scores(
        self,
        ids: Ids,
        logits: Scores,
        step: int,
        *,
        last: bool = False,
        starts: Ids | None = None,
    ) -> Scores:
        """The scores that tokens are chosen by.

        Args:
            ids: of the prompt and what was generated, [batch, tokens].
            logits: of the next token, [batch, vocabulary].
            step: how many tokens were generated before it.
            last: whether none comes after it.
            starts: where each row begins, after its padding, [batch]; None: at its first id.
        """
        if self.repetition_penalty != 1.0:
            logits = penalized(logits, ids, self.repetition_penalty, starts)
        is_forced = ids.shape[1] - step == 1 and self.forced_bos_token_id is not None
        if is_forced and step == 0:
            logits = only((self.forced_bos_token_id or 0,), logits)
        if last and self.forced_eos_token_id:
            logits = only(self.forced_eos_token_id, logits)
        logits = without(self.suppress_tokens, logits)
        if step == int(is_forced):
            logits = without(self.begin_suppress_tokens, logits)
        if not self.do_sample:
            return logits
        if self.temperature != 1.0:
            logits = logits / np.float32(self.temperature)
        if self.top_k is not None:
            logits = only_top_k(logits, self.top_k)
        return only_top_p(logits, self.top_p) if self.top_p < 1.0 else logits

    def choose(
        self,
        ids: Ids,
        logits: Scores,
        random: np.random.Generator,
        step: int,
        *,
        last: bool = False,
        starts: Ids | None = None,
    ) -> Ids:
        """The next token of each row, [batch]; arguments are those of `scores`."""
        scores = self.scores(ids, logits, step, last=last, starts=starts)
        if not self.do_sample:
            return np.asarray(scores.argmax(-1), np.int64)
        cumulative = softmax(scores.astype(np.float64)).cumsum(-1)
        drawn = random.random(len(scores))[:, None] * cumulative[:, -1:]
        return np.asarray((cumulative <= drawn).sum(-1), np.int64)


def only(tokens: Sequence[int], logits: Scores) -> Scores:
    """Zero for some tokens, which the vocabulary has, and minus infinity for all others."""
    beyond = [token for token in tokens if not 0 <= token < logits.shape[1]]
    if beyond:
        raise UsageError(
            "forced_bos_token_id, forced_eos_token_id: expected ids of the vocabulary, 0.."
            f"{logits.shape[1] - 1}, got {', '.join(map(str, beyond))}"
        )
    forced = np.full_like(logits, -np.inf)
    forced[:, list(tokens)] = 0
    return forced


def without(tokens: Sequence[int], logits: Scores) -> Scores:
    """The logits [batch, vocabulary], minus infinity for some tokens: ids that the vocabulary has
    not, such as -1, change nothing.
    """
    if not tokens:
        return logits
    kept = logits.copy()
    kept[:, [token for token in tokens if 0 <= token < logits.shape[1]]] = -np.inf
    return kept


def penalized(logits: Scores, ids: Ids, penalty: float, starts: Ids | None = None) -> Scores:
    """The logits [batch, vocabulary], with those of tokens in `ids` [batch, tokens] nearer to 0
    where they are positive, and farther off where they are negative; for a penalty above 1.  What
    is before `starts` [batch] is padding, and does not count.
    """
    size, factor = logits.shape[1], np.float32(penalty)
    counted = np.minimum(ids, size)  # embeddings may have ids that are never generated
    if starts is not None:
        counted = np.where(np.arange(ids.shape[1]) < starts[:, None], size, counted)
    seen = np.zeros((len(logits), size + 1), np.bool_)
    np.put_along_axis(seen, counted, True, -1)
    changed = np.where(logits < 0, logits * factor, logits / factor)
    return np.where(seen[:, :size], changed, logits)


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
        engine: of a bundle that was exported with `--kv-cache`, or a UsageError.
        encoder: of the part that reads what the decoder attends to; None: that which was loaded
            with the engine, where the model has an encoder.
    """

    def __init__(self, engine: Engine, encoder: Engine | None = None) -> None:
        self.engine = engine
        self.generation = generation_of(engine)
        self.encoder = encoder_of(engine) if encoder is None else encoder
        """None: there is none."""
        self._inputs = {spec.name: spec for spec in engine.inputs}
        before = DECODER if self.encoder is not None else ""
        self._names = {name: f"{before}{name}" for name in (IDS, MASK, POSITIONS)}
        self._encoded: dict[str, Array] = {}
        self._states = {state.input: state.output for state in engine.manifest.states}
        self._ids: Ids = np.zeros((0, 0), np.int64)
        self._mask: Ids = np.zeros((0, 0), np.int64)
        self._positions: Ids = np.zeros((0, 0), np.int64)
        self._past: dict[str, Array] = {}

    @property
    def read(self) -> str:
        """The input that new tokens are fed as."""
        return self._names[IDS]

    @property
    def longest(self) -> int:
        """Tokens that a row may have in all."""
        return self.engine.manifest.symbols[str(self._inputs[self._names[MASK]].shape[1])][1]

    def encode(self, feeds: Mapping[str, Array]) -> None:
        """Run the encoder: what it gives is fed to the decoder in all calls from now on."""
        if self.encoder is None:
            raise UsageError(f"{self.engine.folder}: the model has no encoder")
        types = {spec.name: np.dtype(spec.dtype) for spec in self.encoder.inputs}
        cast = {
            name: np.ascontiguousarray(feed).astype(types.get(name, feed.dtype), copy=False)
            for name, feed in feeds.items()
        }
        found = {ENCODER_MASK: cast.get(MASK), **self.encoder.run(cast)}
        self._encoded = {
            name: np.asarray(array).astype(spec.dtype, copy=False)
            for name, spec in self._inputs.items()
            if (array := found.get(name)) is not None
        }

    def start(self, ids: Ids, mask: Ids) -> Scores:
        """Read prompts.

        Args:
            ids: int64 [batch, tokens], padded on the left.
            mask: int64 [batch, tokens], 0 where there is padding.

        Returns:
            The logits of the next token, float32 [batch, vocabulary].
        """
        self._ids, self._mask = ids, mask
        self._positions = np.where(mask == 0, 0, mask.cumsum(-1) - 1)
        # Keys or values of no token: the batch first, then heads, tokens and width.
        self._past = {}
        for spec in (self._inputs[name] for name in self._states):
            rest = (size if isinstance(size, int) else 0 for size in spec.shape[1:])
            self._past[spec.name] = np.zeros((len(ids), *rest), spec.dtype)
        return self._run(ids, self._positions)

    def step(self, tokens: Ids) -> Scores:
        """Go on by a token in each row, int64 [batch]: the logits of the one that comes after it,
        float32 [batch, vocabulary].
        """
        before = self._ids.shape[1]
        self._ids = np.concatenate([self._ids, tokens[:, None]], -1)
        self._mask = np.concatenate([self._mask, np.ones_like(tokens)[:, None]], -1)
        if before in self.generation.restarts:
            return self.start(self._ids, self._mask)
        self._positions = self._positions[:, -1:] + 1
        return self._run(tokens[:, None], self._positions)

    def _run(self, ids: Ids, positions: Ids) -> Scores:
        given = {IDS: ids, MASK: self._mask, POSITIONS: positions}
        feeds: dict[str, Array] = {
            name: given[known] for known, name in self._names.items() if name in self._inputs
        }
        feeds |= self._encoded | self._past
        outputs = self.engine.run({n: np.ascontiguousarray(feed) for n, feed in feeds.items()})
        self._past = {
            name: outputs[output].astype(self._inputs[name].dtype, copy=False)
            for name, output in self._states.items()
        }
        return np.asarray(outputs[LOGITS][:, -1], np.float32)


def encoder_of(engine: Engine) -> Engine | None:
    """The engine of the encoder of a bundle; None for a model without one."""
    name = generation_of(engine).encoder
    return engine.parts[name] if name else None


def generation_of(engine: Engine) -> Generation:
    """What a bundle says of text generation; a UsageError where its engine generates none."""
    found = engine.manifest.generation
    if found is None:
        raise UsageError(
            f"{engine.folder}: the engine does not generate text",
            hint="Export the model with --kv-cache.",
        )
    return found


def generate(
    engine: Engine,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    decoder_input_ids: Any = None,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    suppress_tokens: Sequence[int] | None = None,
    begin_suppress_tokens: Sequence[int] | None = None,
    forced_bos_token_id: int | Sequence[int] | None = None,
    forced_eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    ignore: Collection[str] = (),
) -> Ids:
    """Generate text that continues prompts.

    Args:
        engine: an engine that was exported with `--kv-cache`.
        input_ids: the prompts, int64 [batch, tokens], padded on the left; or, if the model has an
            encoder, its input: text with padding on either side, audio, an image, or a dict of
            several inputs by name.
        attention_mask: [batch, tokens], 0 for padding; None: as in transformers, all padding ids
            are padding, unless they may also end a text; an encoder reads everything.
        decoder_input_ids: the decoder's first ids, int64 [batch, tokens], without padding; None:
            those of the model's generation config.
        max_new_tokens: the largest number of new tokens.
        eos_token_id: ids that end a row; None: those of the generation config; (): none.
        pad_token_id: fills rows that have ended; None: the generation config's, or the first id
            that ends a row.
        do_sample: sample the next token; False: take the one with the highest score.
        temperature: divides the scores; None, here and below: the generation config's.
        top_k: sample from so many tokens with the highest scores; 0: from all.
        top_p: sample from the fewest tokens whose probabilities add up to this.
        repetition_penalty: makes tokens that are already in the row less likely.
        suppress_tokens: ids that are never chosen; (), here and below: none.
        begin_suppress_tokens: ids that are never the first new token.
        forced_bos_token_id: the id after a prompt of one token, such as a decoder's first.
        forced_eos_token_id: the last token of rows that have not ended.
        seed: seed for sampling; None: another one in each call.
        ignore: fields of the generation config to ignore without a warning, such as
            ("num_beams",).

    Returns:
        Prompts (or the decoder's first ids) and new tokens, int64 [batch, tokens + new tokens].

    Raises:
        InputError: the prompts do not fit the engine.
        UsageError: the engine does not generate text, or a number is out of range.
        EnginecastError: as `Engine.run`.

    Warns:
        EnginecastWarning: the model's generation config asks for more, such as `num_beams`.

    Examples:
        >>> import enginecast, numpy
        >>> from enginecast.runtime import generate
        >>> prompts = numpy.array([[5, 7, 11]])
        >>> with enginecast.load("llama.bundle") as engine:
        ...     tokens = generate(engine, prompts, max_new_tokens=4)
        >>> tokens[:, :3].tolist()
        [[5, 7, 11]]
    """
    first, new = token_steps(
        engine,
        input_ids,
        attention_mask,
        decoder_input_ids=decoder_input_ids,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        suppress_tokens=suppress_tokens,
        begin_suppress_tokens=begin_suppress_tokens,
        forced_bos_token_id=forced_bos_token_id,
        forced_eos_token_id=forced_eos_token_id,
        seed=seed,
        ignore=ignore,
    )
    return np.concatenate([first, *(each[:, None] for each in new)], -1)


def token_steps(
    engine: Engine,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    decoder_input_ids: Any = None,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    suppress_tokens: Sequence[int] | None = None,
    begin_suppress_tokens: Sequence[int] | None = None,
    forced_bos_token_id: int | Sequence[int] | None = None,
    forced_eos_token_id: int | Sequence[int] | None = None,
    seed: int | None = None,
    ignore: Collection[str] = (),
) -> tuple[Ids, Iterator[Ids]]:
    """The same one step at a time: what the tokens follow, [batch, tokens], and those of each step,
    [batch], which are computed as they are asked for.
    """
    floats = {"temperature": temperature, "top_p": top_p, "repetition_penalty": repetition_penalty}
    whole = {"max_new_tokens": max_new_tokens, "top_k": top_k, "seed": seed}
    for name, value in {**floats, **whole}.items():
        what, method = ("a number", "__float__") if name in floats else ("an integer", "__index__")
        if value is not None and not hasattr(value, method):
            raise UsageError(f"generate: {name}: expected {what}, got {value!r}")
    decoder = Decoder(engine)
    own = decoder.generation
    unheeded = _unheeded(own, is_begun=decoder_input_ids is not None)
    if names := ", ".join(name for name in unheeded if name not in ignore):
        message = (
            f"generate: the model's generation config sets {names}, which an engine does not heed:"
            " the tokens may be others than those of the model's own generate"
        )
        warnings.warn(message, EnginecastWarning, stacklevel=3)
    sampling = Sampling(
        do_sample,
        own.temperature if temperature is None else temperature,
        (own.top_k if top_k is None else top_k) or None,
        own.top_p if top_p is None else top_p,
        own.repetition_penalty if repetition_penalty is None else repetition_penalty,
        either(suppress_tokens, own.suppress_ids),
        either(begin_suppress_tokens, own.begin_suppress_ids),
        next(iter(either(forced_bos_token_id, own.forced_first_ids)), None),
        either(forced_eos_token_id, own.forced_last_ids),
    )
    endings = either(eos_token_id, own.ending_ids)
    padding = own.padding_id if pad_token_id is None else pad_token_id
    begun = _begin(decoder, input_ids, attention_mask, decoder_input_ids, padding, endings)
    new = _tokens(decoder, begun, max_new_tokens, endings, padding, sampling, seed)
    return begun.ids, new


@dataclass(frozen=True)
class _Begun:
    """What a run begins with."""

    ids: Ids
    """That the decoder reads, [batch, tokens]."""
    mask: Ids
    encoded: Mapping[str, Array]
    """Inputs of the encoder; empty without one."""


def _begin(
    decoder: Decoder,
    inputs: Any,
    attention_mask: Any,
    decoder_input_ids: Any,
    padding: int | None,
    endings: Sequence[int],
) -> _Begun:
    """What was given, checked."""
    if decoder.encoder is None:
        if decoder_input_ids is not None:
            raise UsageError("decoder_input_ids: the model has no encoder; give input_ids alone")
        ids = _ids(IDS, inputs)
        mask = _mask(ids, attention_mask, padding, endings)
        if not mask[:, -1].all():  # the new tokens would follow the padding
            row = int((mask[:, -1] == 0).argmax())
            raise InputError(
                f"input_ids: expected padding on the left, got a row {row} that ends in padding",
                hint="Set padding_side='left' where the prompts are tokenized.",
            )
        return _Begun(ids, mask, {})
    feeds = _encoder_feeds(decoder.encoder, inputs, attention_mask)
    start = decoder.generation.start_ids
    rows = len(next(iter(feeds.values())))
    if decoder_input_ids is None:
        ids = np.tile(np.array(start, np.int64), (rows, 1))
    else:
        ids = _ids("decoder_input_ids", decoder_input_ids)
        if len(ids) != rows:
            raise InputError(f"decoder_input_ids: expected {rows} rows, got {len(ids)}")
        if (ids[:, 0] != start[0]).any():
            raise InputError(
                f"decoder_input_ids: expected rows that begin with {start[0]}, which the model's"
                f" generation config begins with, got {ids[:, 0].tolist()}"
            )
    return _Begun(ids, np.ones_like(ids), feeds)


def _encoder_feeds(encoder: Engine, given: Any, attention_mask: Any) -> dict[str, Array]:
    """The inputs of an encoder.  Where no mask of a text is given, transformers takes all of it for
    text, padding too: it infers masks for models without an encoder alone.
    """
    main = encoder.inputs[0]
    arrays = {**given} if isinstance(given, Mapping) else {main.name: given}
    if attention_mask is not None:
        arrays[MASK] = attention_mask
    feeds: dict[str, Array] = {}
    for name, value in arrays.items():
        try:
            feeds[name] = to_array(value)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise InputError(f"{name}: expected an array, got {error}") from error
    if main.name not in feeds:
        raise InputError(f"expected {main.name}, which the encoder reads, got {', '.join(feeds)}")
    if main.kind == "token_ids":
        feeds[main.name] = ids = _ids(main.name, arrays[main.name])
        if any(spec.name == MASK for spec in encoder.inputs):
            feeds[MASK] = _mask(ids, feeds.get(MASK), None, ())
    return feeds


def _tokens(
    decoder: Decoder,
    begun: _Begun,
    max_new_tokens: int,
    endings: Sequence[int],
    padding: int | None,
    sampling: Sampling,
    seed: int | None,
) -> Iterator[Ids]:
    ids = begun.ids
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if ids.shape[1] + max_new_tokens - 1 > decoder.longest:
        most = max(0, decoder.longest - ids.shape[1] + 1)
        raise InputError(
            f"{decoder.read}: expected prompts that leave room for {max_new_tokens} new tokens, got"
            f" {ids.shape[1]} tokens of {decoder.longest} that the engine takes",
            hint=f"At most {most} new tokens fit." if most else "Give shorter prompts.",
        )
    if seed is not None and seed < 0:
        raise UsageError(f"seed: expected at least 0, got {seed}")
    random = np.random.default_rng(seed)
    running = np.ones(len(ids), np.bool_)
    filler = padding if padding is not None else next(iter(endings), 0)
    if decoder.encoder is not None:
        decoder.encode(begun.encoded)
    logits = decoder.start(ids, begun.mask)
    starts = np.asarray((begun.mask != 0).argmax(-1), np.int64)
    for step in range(max_new_tokens):
        last = step + 1 == max_new_tokens
        chosen = sampling.choose(ids, logits, random, step, last=last, starts=starts)
        found = np.where(running, chosen, filler)
        yield found
        running &= ~np.isin(found, endings)
        if last or not running.any():
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
    return mask


def either(given: int | Sequence[int] | None, own: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that somebody gave, or else the model's own."""
    return own if given is None else tuple(np.atleast_1d(np.asarray(given, np.int64)).tolist())


TAKEN = (
    "max_new_tokens",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
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
    *("bad_words_ids", "sequence_bias", "constraints", "force_words_ids", "stop_strings"),
    *("penalty_alpha", "assistant_model", "prompt_lookup_num_tokens", "max_time", "top_h"),
    *("exponential_decay_length_penalty", "watermarking_config", "dola_layers"),
    *("return_timestamps", "prompt_ids", "condition_on_prev_tokens"),
)
"""Fields of a GenerationConfig that change the tokens, and are not heeded."""


LISTS = (
    *("suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
"""What None switches off where a caller gives it."""
PROMPTING = (
    *("lang_to_id", "task_to_id", "no_timestamps_token_id", "language", "task"),
    "forced_decoder_ids",
)
"""Fields from which a class makes what its decoder reads first, which an engine does not."""


class Generator:
    """A drop-in for a transformers model, for its `generate`.

    It returns torch tensors if it gets torch tensors, and numpy arrays otherwise.

    Args:
        engine: an engine that was exported with `--kv-cache`.

    Examples:
        >>> import enginecast, torch
        >>> from enginecast.runtime import Generator
        >>> model = Generator(enginecast.load("llama.bundle"))
        >>> model.generate(torch.tensor([[5, 7, 11]]), max_new_tokens=4)[:, :3]
        tensor([[ 5,  7, 11]])
    """

    def __init__(self, engine: Engine) -> None:
        generation_of(engine)
        self.engine = engine

    def __repr__(self) -> str:
        """The model, and the engine."""
        model = self.engine.manifest.model.name
        return f"Generator({str(self.engine.folder)!r}, {self.engine.backend}: {model})"

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> Any:
        """Generate text as `model.generate` does.

        Args:
            inputs: the prompts, int64 [batch, tokens], padded on the left; or the encoder's input,
                if the model has one.
            input_ids: the same, by name.
            generation_config: a GenerationConfig; `options` override it.
            attention_mask: [batch, tokens], 0 for padding.
            decoder_input_ids: the decoder's first ids, [batch, tokens].
            seed: seed for sampling; the random numbers differ from torch's.
            **options: max_new_tokens or max_length, eos_token_id, pad_token_id, do_sample,
                temperature, top_k, top_p, repetition_penalty, suppress_tokens,
                begin_suppress_tokens, forced_bos_token_id and forced_eos_token_id; and inputs of
                the encoder by name, such as input_features.  Defaults, except for lengths, come
                from the model's generation config.

        Returns:
            Prompts (or the decoder's first ids) and new tokens, int64 [batch, tokens + new tokens];
            only new tokens if that is what the model's own `generate` returns.

        Raises:
            UsageError: an argument, or a field of the model's generation config, is not supported
                and would change the tokens.
            EnginecastError: as the function `generate`.
        """
        encoder = encoder_of(self.engine)
        names = () if encoder is None else tuple(spec.name for spec in encoder.inputs)
        feeds = {name: options.pop(name) for name in names if name in options}
        main = names[0] if names else IDS
        ways = [inputs, input_ids, feeds.get(main)]
        if sum(way is not None for way in ways) != 1:
            raise UsageError(f"generate: expected prompts once, as {main}")
        given = next(way for way in ways if way is not None)
        first = given if encoder is None else decoder_input_ids
        own = generation_of(self.engine)
        before = len(own.start_ids) if first is None else _ids(IDS, first).shape[1]
        # None has no fields, so that it asks for nothing.
        fields = (*TAKEN, "max_length", *CHANGES)
        values = {name: getattr(generation_config, name, None) for name in fields}
        asked = {name: value for name, value in values.items() if value is not None} | options
        self._require_heeded(asked, is_begun=decoder_input_ids is not None)
        asked |= {name: () for name in LISTS if name in options and options[name] is None}
        longest = asked.pop("max_length", None)
        if asked.get("max_new_tokens") is None:
            asked["max_new_tokens"] = 20 if longest is None else longest - before
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
        found = generate(
            self.engine,
            {**feeds, main: given} if encoder is not None else given,
            attention_mask,
            decoder_input_ids=decoder_input_ids,
            seed=seed,
            ignore=own.not_heeded,
            **given_options,
        )
        if own.checked is not None and own.checked.own == "new tokens":
            found = found[:, before:]
        like = getattr(given, "new_tensor", None)  # torch's, which is not imported here
        # Of floats, such as a spectrogram, it would be one of floats.
        return found if like is None else like(found, dtype=given[:0].long().dtype)

    def _require_heeded(self, asked: Mapping[str, Any], *, is_begun: bool) -> None:
        """Refuse a model whose own `generate` would do what engines do not.

        Args:
            asked: what a caller decides.
            is_begun: whether that is what the decoder reads first, too.
        """
        own = generation_of(self.engine)
        if own.checked is not None and own.checked.own == "other":
            raise UsageError(
                "generate: the model's class has a generate of its own, which does not return what"
                " transformers' does, and the engines follow that one",
                hint="Use the function enginecast.runtime.generate.",
            )
        kept = [name for name in _unheeded(own, is_begun=is_begun) if name not in asked]
        if kept:
            without = f"Give {kept[0]}=None to generate without it."
            raise UsageError(
                f"generate: the model's generation config sets {kept[0]}, which an engine does not"
                " heed",
                hint="Give decoder_input_ids." if kept[0] in PROMPTING else without,
            )


def _unheeded(own: Generation, *, is_begun: bool) -> list[str]:
    """What of the model's generation config would change the tokens, and does not here; `is_begun`:
    a caller gives what the decoder reads first.
    """
    return [name for name in own.not_heeded if not (is_begun and name in PROMPTING)]


def _changes(name: str, value: Any) -> bool:
    """Whether a value of what is not heeded would change the tokens."""
    if value is None or (isinstance(value, (list, tuple, dict)) and not value):
        return False
    return value not in WITHOUT_EFFECT.get(name, ())


def not_heeded(config: Any) -> tuple[str, ...]:
    """The fields of a GenerationConfig that would change the tokens, and are not heeded."""
    names = (*CHANGES, *(name for name in PROMPTING if name != "forced_decoder_ids"))
    return tuple(name for name in names if _changes(name, getattr(config, name, None)))
