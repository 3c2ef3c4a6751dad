"""The run of `generate` that a language model's engine has to reproduce."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from enginecast.capture.inputs.examples import sample
from enginecast.capture.inputs.specs import BATCH, SEQUENCE, InputSpec, named_dims
from enginecast.capture.python.quiet import quiet_torch, quiet_transformers
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.generation.decoder import (
    IDS,
    LOGITS,
    MASK,
    TEXT_GENERATION,
    DecoderSource,
)
from enginecast.capture.sources.generation.encoder_decoder import ENCODER_MASK
from enginecast.compiler.engines.checks import Check, Examined, Running
from enginecast.compiler.engines.lower_and_run import open_part
from enginecast.compiler.prepare.cases import SEED
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.steps import Steps
from enginecast.compiler.tasks.base import NOT_COMPARED, Part, Task, with_field
from enginecast.errors import EnginecastError, VerificationError, first_line
from enginecast.passes.ir.text import DTYPES
from enginecast.runtime.bundle.manifest import (
    Generation,
    GenerationCheck,
    Manifest,
    State,
    StepCheck,
)
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.engine import Engine
from enginecast.runtime.generation import not_heeded
from enginecast.verification.engine import runs_natively, where_it_ran
from enginecast.verification.floor import LIMIT, Floor, least_floor
from enginecast.verification.generation import (
    Continued,
    Numbers,
    continued,
    follow,
    write_continued,
)
from enginecast.verification.metrics import Array, measure, pool, ratio, times
from enginecast.verification.reference import GIVEN_PROMPTS
from enginecast.verification.verdict import judge

STEPS = 64
"""Tokens that are generated for each prompt."""
OWN_STEPS = 8
"""Tokens that a class's own `generate` generates."""
LENGTHS = (8, 5, 3, 1)
"""Lengths of the prompts in tokens; they are padded on the left to the longest."""
LONGEST_GIVEN = 32
"""Tokens that the user's prompts are cut to, from the left."""
LARGE_VOCABULARY = 50_000
"""Vocabulary size from which on only two prompts are used: all logits of all steps are held at
once, in fp64."""


@dataclass(frozen=True)
class Run:
    """What the model generated, and its logits [prompts, steps, vocabulary]."""

    model: Continued
    exact: Numbers
    floor: Floor
    problems: tuple[str, ...]
    """Why this run cannot serve as a reference."""
    encoded: Mapping[str, Array]
    """The encoder's inputs; empty without an encoder."""
    own: Literal["", "same", "new tokens", "other"]
    """See `GenerationCheck`."""


class GenerationTask(Task):
    """A step of a language model, whose cache goes from call to call."""

    def describe(self, source: Source) -> dict[str, Any]:
        assert isinstance(source, DecoderSource)  # sources name their task
        pairs = zip(source.past, source.present, strict=True)
        generation = Generation(
            task=TEXT_GENERATION,
            encoder=next(iter(source.parts()), ""),
            start_ids=source.start_ids,
            padding_id=source.own_padding,
            ending_ids=source.endings,
            **source.settings,
            suppress_ids=source.ids_of("suppress_tokens"),
            begin_suppress_ids=source.ids_of("begin_suppress_tokens"),
            forced_first_ids=source.ids_of("forced_bos_token_id"),
            forced_last_ids=source.ids_of("forced_eos_token_id"),
            restarts=source.restarts,
            not_heeded=(*not_heeded(source.generation_config), *source.not_heeded),
        )
        states = tuple(State(input=before, output=after, grows=2) for before, after in pairs)
        return {"generation": generation, "states": states}

    def checks(
        self,
        prepared: Prepared,
        floor: Floor,
        folder: Path,
        steps: Steps,
        parts: Mapping[str, Part],
    ) -> tuple[Check, ...]:
        source = prepared.source
        assert isinstance(source, DecoderSource)
        [encoder] = parts.values() or [None]
        with steps("generate"):
            read = None if encoder is None else encoder.prepared
            run = generated(prepared, source, floor, read)
            write_continued(folder, run.model, run.encoded)
        return (Generates(run, None if encoder is None else encoder.bundle),)

    def with_result(
        self, manifest: Manifest, found: GenerationCheck | StepCheck
    ) -> tuple[Manifest, str]:
        assert isinstance(found, GenerationCheck)
        assert manifest.generation is not None
        ties = f", but for {found.ties} that tie" if found.ties else ""
        note = (
            f"generates what the model does: {found.steps} tokens of {found.prompts} prompts, all"
            f" equal{ties}; logits {times(ratio(found.error, found.floor))} the model's own error"
        )
        generation = msgspec.structs.replace(manifest.generation, checked=found)
        return with_field(manifest, generation=generation), note


def generated(
    prepared: Prepared, source: DecoderSource, single: Floor, encoder: Prepared | None = None
) -> Run:
    """Run the model's `generate`, and compute the logits of its tokens in fp64.

    Args:
        single: the noise floor of single calls, in the engine's dtype.
        encoder: the encoder of a model that has one.

    Raises:
        VerificationError: the model's own `generate` fails.
    """
    dtype = single.dtype
    read: dict[str, Tensor] = {}
    if encoder is not None:
        read = _read(encoder, prepared, source)
        ids = torch.tensor([source.start_ids]).repeat(len(next(iter(read.values()))), 1)
        mask = torch.ones_like(ids)
    else:
        ids, mask = _prompts(prepared, source)
    # One call over the whole text is the measure: it has no cache to drop halfway.
    kept = [length for length in source.restarts if length >= ids.shape[1]]
    longest = min([_longest(prepared.inputs, source), *kept])
    steps = min(STEPS, longest - ids.shape[1] + 1)
    tokens, plain, own_way = _by_transformers(source, ids, mask, steps, read)
    text = torch.cat([ids, tokens], 1)[:, :-1]
    whole = torch.cat([mask, torch.ones_like(tokens)], 1)[:, :-1]
    inputs = source.prompt_inputs(prepared.inputs, text, whole)
    start = ids.shape[1] - 1

    def own_logits(dtype: str) -> Numbers:
        """The model's own logits in this dtype, by calls of its `forward`."""
        fed = inputs
        for part in source.parts().values():
            fed = {**inputs, **_with_mask(read, _run(part, read, dtype), inputs)}
        return logits(_run(source, fed, dtype))

    def logits(outputs: Mapping[str, Tensor]) -> Numbers:
        return np.asarray(outputs[LOGITS][:, start:].double().numpy())

    fed = inputs
    if encoder is not None:
        [cross] = encoder.exact.outputs([read])
        fed = {**inputs, **_with_mask(read, cross, inputs)}
    [found] = prepared.exact.outputs([fed])
    exact = logits(found)
    own = own_logits("fp32")
    problems = [] if np.isfinite(exact).all() else ["its logits are not finite"]
    off, usual = _distance(plain, exact), max(_distance(own, exact), least_floor("fp32"))
    if not off <= LIMIT * usual:
        problems.append(
            f"the logits of generate are off by {off:.2g} from those of the captured step in fp64,"
            f" whose own error in fp32 is {usual:.2g}: the step is not what generate runs"
        )
    if dtype != "fp32":
        plain = own_logits(dtype)
    by_step = {
        f"step {index + 1}": {LOGITS: measure(plain[:, index], exact[:, index])}
        for index in range(exact.shape[1])
    }
    floor = Floor(dtype, by_step, kernels=single.kernels)
    model = continued(ids.numpy(), mask.numpy(), tokens.numpy(), exact, plain, dtype)
    arrays = {name: tensor.numpy() for name, tensor in read.items()}
    problems = [f"generating: {each}" for each in problems]
    return Run(model, exact, floor, tuple(problems), arrays, own_way)


@dataclass(frozen=True)
class Generates(Check):
    """An engine generates along the model's tokens."""

    run: Run
    encoder: Bundle | None
    """Of a model that has one."""
    without_run = NOT_COMPARED

    def examine(self, running: Running) -> Examined:
        if self.encoder is None:
            return self._followed(running.engine)
        assert running.config is not None  # the engine is being made
        with open_part(self.encoder, running.config, running.threads) as encoder:
            return self._followed(running.engine, encoder)

    def _followed(self, engine: Engine, encoder: Engine | None = None) -> Examined:
        run = self.run
        followed = follow(engine, run.model, run.encoded, encoder)
        logits = [np.asarray(each, np.float64) for each in followed.logits]
        steps = {
            name: {LOGITS: measure(found, run.exact[:, index])}
            for index, (name, found) in enumerate(zip(run.floor.cases, logits, strict=False))
        }
        verdict = judge(
            steps,
            run.floor,
            where=where_it_ran(engine),
            engine_ran=runs_natively(run.floor.dtype, engine.provider),
        )
        wrong = verdict.reasons if verdict.outcome == "rejected" else ()
        error = pool([found[LOGITS] for found in steps.values()]).relative if steps else 1.0
        checked = GenerationCheck(
            prompts=run.exact.shape[0],
            steps=run.exact.shape[1],
            ties=followed.ties,
            error=error,
            floor=run.floor.of(LOGITS),
            own=run.own,
        )
        failures = (*run.problems, *followed.failures, *(f"generating: {each}" for each in wrong))
        return Examined(tuple(dict.fromkeys(failures)), checked)


def _distance(found: Numbers, exact: Numbers) -> float:
    """Relative L2 distance."""
    difference = float(np.linalg.norm(found - exact))
    return ratio(difference, float(np.linalg.norm(exact)))


def _read(encoder: Prepared, decoder: Prepared, source: DecoderSource) -> dict[str, Tensor]:
    """The encoder's inputs: the user's or random texts, padded on the right; or sound or images."""
    by_name = {spec.name: spec for spec in decoder.inputs}
    high = by_name[source.ids].high
    rows = 2 if high is None or high >= LARGE_VOCABULARY else len(LENGTHS)
    rows = by_name[source.ids].dims[0].fit(rows)
    given = next((case for case in encoder.cases if case.name == GIVEN_PROMPTS), None)
    if given is not None:
        kept = [row % len(next(iter(given.inputs.values()))) for row in range(rows)]
        return {
            name: tensor[kept, :LONGEST_GIVEN] if tensor.ndim == 2 else tensor[kept]
            for name, tensor in given.inputs.items()
        }
    dims = named_dims(encoder.inputs)
    wanted = {BATCH: rows, SEQUENCE: LENGTHS[0]}
    sizes = {name: dims[name].fit(size) for name, size in wanted.items() if name in dims}
    return sample(encoder.inputs, sizes, SEED, lengths=LENGTHS)


def _with_mask(
    read: Mapping[str, Tensor], cross: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The decoder's inputs that come from the encoder's inputs and outputs."""
    found = {ENCODER_MASK: read.get(MASK), **cross}
    return {name: tensor for name in inputs if (tensor := found.get(name)) is not None}


def _prompts(prepared: Prepared, source: DecoderSource) -> tuple[Tensor, Tensor]:
    """Ids and mask of the user's or random prompts, padded on the left, both [prompts, tokens]."""
    by_name = {spec.name: spec for spec in prepared.inputs}
    spec = by_name[IDS]
    assert spec.low is not None
    assert spec.high is not None
    rows = 2 if spec.high >= LARGE_VOCABULARY else len(LENGTHS)
    rows = spec.dims[0].fit(rows)
    most = min(spec.dims[1].maximum, max(1, _longest(prepared.inputs, source) // 2))
    given = next((case for case in prepared.cases if case.name == GIVEN_PROMPTS), None)
    if given is not None:
        texts = [
            ids[row_mask != 0][-min(most, LONGEST_GIVEN) :]
            for ids, row_mask in zip(given.inputs[IDS], given.inputs[MASK], strict=True)
        ]
        texts = [*islice(cycle(texts), rows)] if len(texts) < spec.dims[0].minimum else texts[:rows]
    else:
        random = torch.Generator().manual_seed(SEED)
        texts = [
            torch.randint(spec.low, spec.high + 1, (min(length, most),), generator=random)
            for length in islice(cycle(LENGTHS), rows)
        ]
    longest = max(max(map(len, texts)), spec.dims[1].minimum)
    ids = torch.full((len(texts), longest), spec.padding or 0)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :], mask[row, longest - len(text) :] = text, 1
    return ids, mask


def _longest(specs: Sequence[InputSpec], source: DecoderSource) -> int:
    """The most tokens of a row, and of one call."""
    by_name = {spec.name: spec for spec in specs}
    return min(by_name[name].dims[1].maximum for name in (source.mask, source.ids))


def _by_transformers(
    source: DecoderSource, ids: Tensor, mask: Tensor, steps: int, read: Mapping[str, Tensor]
) -> tuple[Tensor, Numbers, Literal["", "same", "new tokens", "other"]]:
    """Tokens [prompts, steps] and logits of a greedy run without early stopping, and the result of
    the class's own `generate` if it has one.
    """
    given = {source.ids: ids, source.mask: mask, **read}
    model = source.generator()
    asked = GenerationConfig(
        do_sample=False,
        max_new_tokens=steps,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=source.padding,
        decoder_start_token_id=int(ids[0, 0]) if read else None,
    )
    model.generation_config = asked
    try:
        with torch.no_grad(), quiet_torch(), quiet_transformers():
            # Of classes with an encoder some have one of their own, which cuts what is long.
            generate = partial(GenerationMixin.generate, model) if read else model.generate
            found: Any = generate(**given, generation_config=asked)
            own: Any = None
            if read and type(model).generate is not GenerationMixin.generate:
                few = min(steps, OWN_STEPS)
                own = model.generate(
                    **{**read, source.ids: ids},
                    max_new_tokens=few,
                    do_sample=False,
                    return_dict_in_generate=False,
                )
    except EnginecastError:
        raise
    except Exception as error:  # the model's own code
        raise VerificationError(
            f"{source.name}: the model's own generate fails: {type(error).__name__}:"
            f" {first_line(error)}"
        ) from error
    logits = torch.stack(found.logits, 1).double().numpy()
    new = found.sequences[:, ids.shape[1] :]
    if own is None:
        return new, logits, ""
    if torch.equal(own, found.sequences[:, : ids.shape[1] + few]):
        return new, logits, "same"
    return new, logits, "new tokens" if torch.equal(own, new[:, :few]) else "other"


def _run(source: Source, inputs: Mapping[str, Tensor], dtype: str) -> Mapping[str, Tensor]:
    module = source.eager(DTYPES[dtype])
    cast = {n: t.to(DTYPES[dtype]) if t.is_floating_point() else t for n, t in inputs.items()}
    with torch.no_grad(), quiet_torch():
        found: Mapping[str, Tensor] = module(**cast)
    return found
