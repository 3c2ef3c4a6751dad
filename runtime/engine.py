"""A loaded engine: the same interface whatever runs it."""

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from enginecast.errors import (
    EnginecastError,
    InputError,
    StoppedError,
    UsageError,
    VerificationError,
)
from enginecast.public import described, some
from enginecast.runtime.bundle.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    EngineRecord,
    Guard,
    Input,
    Manifest,
    Output,
    Verdict,
)
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.limits import Limits, require_memory
from enginecast.runtime.sessions.session import Session, Stop
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.trimming import GROUP_TOKENS, PadRows, Trimming
from enginecast.runtime.validate import check_inputs
from enginecast.runtime.values.arrays import Array, is_finite
from enginecast.runtime.values.device_tensor import DeviceTensor, Feed, can_view, lies_on_gpu, view

if TYPE_CHECKING:  # `tokenizers` is imported with the first text
    from enginecast.runtime.prompts import PromptEncoder
    from enginecast.runtime.text_generation import TextGenerator


CHAT_NAMES = (TOKENIZER_CONFIG_NAME, CHAT_TEMPLATE_NAME)
MOST_SMALL = 256
"""Sizes whose memory was seen to need no second look that an engine remembers."""


class Outputs(dict[str, Any]):
    """The outputs of a run by name, with the backend that computed them; otherwise a plain dict.

    Args:
        values: arrays or tensors by name.
        backend: what computed them, as `load`'s `prefer` calls it.
    """

    backend: str
    """As `load`'s `prefer` calls it: "onnxruntime-cpu"."""

    def __init__(self, values: Mapping[str, Any], backend: str) -> None:
        super().__init__(values)
        self.backend = backend

    def __missing__(self, name: object) -> Any:
        raise KeyError(f"{name!r} is no output; expected {', '.join(self)}")

    def __repr__(self) -> str:
        """The backend, and names, dtypes and shapes."""
        named = ", ".join(f"{name} {described(value)}" for name, value in self.items())
        return f"{type(self).__name__}({self.backend}: {named})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Outputs, (dict(self), self.backend)


class Encoded(Outputs):
    """The outputs of texts, with an `attention_mask` that marks the rows of tokens.

    Args:
        values: arrays by name.
        backend: what computed them.
        truncated: how many texts were cut.
    """

    truncated: int
    """How many texts were cut to the longest that the model takes."""

    def __init__(self, values: Mapping[str, Any], backend: str, truncated: int) -> None:
        super().__init__(values, backend)
        self.truncated = truncated

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoded, (dict(self), self.backend, self.truncated)


class Engine:
    """A loaded engine.  Made by `enginecast.load`.

    Use it as a context manager, or call `close`.  `run` may be called from several threads at once,
    and awaited as `run_async`.
    """

    def __init__(
        self,
        bundle: Bundle,
        record: EngineRecord,
        session: Session,
        settings: Settings = DEFAULT,
        *,
        pad_rows: PadRows = "exact",
        max_runs: int | None = None,
        parts: Mapping[str, "Engine"] | None = None,
    ) -> None:
        self.parts: Mapping[str, Engine] = dict(parts or {})
        """The engines of the bundles within the bundle, by name, such as "encoder"."""
        self._process = os.getpid()
        self._limits = Limits(max_runs)
        self._small: set[tuple[Any, ...]] = set()
        self._bundle = bundle
        self._settings = settings
        self._record = record
        self._provider = session.provider
        self._backend = session.backend
        self._session: Session | None = session
        self._names = tuple(output.name for output in bundle.manifest.outputs)
        self._pad_rows = pad_rows
        self._on_gpu = "cpu" not in session.provider.lower()
        padding, self._trimming = bundle.manifest.padding, None
        if padding is not None and padding.outputs:
            # Groups of rows were measured to be faster on ONNX Runtime's CPU provider.
            threads = settings.threads or os.cpu_count() or 1
            grouped = GROUP_TOKENS * threads if session.provider == "CPUExecutionProvider" else 0
            self._trimming = Trimming(
                bundle.manifest, padding, on_gpu=self._on_gpu, group_tokens=grouped
            )
        if pad_rows == "zero":
            self._require_trimming(padding.outputs if padding else ())
        # Read now: the files may be replaced or deleted before the first text comes.
        of_chats = () if bundle.manifest.generation is None else CHAT_NAMES
        named = {file.name for file in bundle.manifest.files} & {TOKENIZER_NAME, *of_chats}
        self._tokenizer = {name: bundle.read(name) for name in named}

    def __repr__(self) -> str:
        """Target, precision and verdict, and the signature with its ranges."""
        inputs = some(_shown(one, self.manifest) for one in self.inputs)
        outputs = some(_shown(one, self.manifest) for one in self.outputs)
        state = ", closed" if self._session is None else ""
        record = self._record
        return (
            f"Engine({str(self.folder)!r}, {self._backend}, {record.quantized or record.precision},"
            f" {record.verdict.outcome}{state}: {inputs} -> {outputs})"
        )

    def __call__(self, *feeds: Any, **inputs: Any) -> Outputs:
        """Run the engine on inputs by position, by name, or both.

        Args:
            feeds: the inputs in the order of `inputs`, which is that of the model's arguments;
                those that come by name are left out. Or one mapping of inputs by name.
            inputs: by name, each as `run` takes them.

        Returns:
            The outputs by name: tensors of torch where one of the inputs is such a tensor, and
            numpy arrays else. Tensors are on the GPU where one of the inputs is.

        Raises:
            InputError: as `run`; or an input was given twice, or there are too many.

        Examples:
            >>> import enginecast, numpy, torch
            >>> engine = enginecast.load("linear.bundle")
            >>> engine(numpy.zeros((3, 8), "float32"))
            Outputs(onnxruntime-cpu: output_0 float32 [3, 2])
            >>> engine(input=torch.zeros(3, 8))["output_0"].shape
            torch.Size([3, 2])
        """
        given = arranged([one.name for one in self.inputs], feeds, inputs)
        return as_given(given, self.run(given, as_dlpack=among_gpu(given)), self.outputs)

    @property
    def folder(self) -> Path:
        """The bundle's folder."""
        return self._bundle.root

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest: model, signature, engines, verdicts."""
        return self._bundle.manifest

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Names, dtypes, shapes and ranges of the inputs of `run`."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Names, dtypes and shapes of the outputs of `run`."""
        return self.manifest.outputs

    @property
    def record(self) -> EngineRecord:
        """The manifest's record of this engine."""
        return self._record

    @property
    def verdict(self) -> Verdict:
        """How the engine compared with eager."""
        return self._record.verdict

    @property
    def settings(self) -> Settings:
        """The settings it was opened with, from `enginecast tune` or the arguments of `load`."""
        return self._settings

    @property
    def provider(self) -> str:
        """The provider that runs the engine, such as "CPUExecutionProvider"."""
        return self._provider

    def layers(self) -> tuple[str, ...]:
        """A description of the engine's layers; empty if the runtime does not report them.

        Raises:
            UsageError: the engine is closed.
        """
        return self._open().layers()

    @property
    def backend(self) -> str:
        """The backend that runs the engine, as `load`'s `prefer` names it: "onnxruntime-cpu"."""
        return self._backend

    def versions(self) -> dict[str, str]:
        """The versions of the packages that run the engine.

        Raises:
            UsageError: the engine is closed.
        """
        return self._open().versions()

    def run(
        self,
        feeds: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        as_dlpack: bool = False,
        check_finite: bool = True,
        pad_rows: PadRows | None = None,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the engine.

        Args:
            feeds: for each input a numpy array, or a tensor with `__dlpack__`, in the declared
                dtype.  Tensors on the engine's GPU are read in place, which needs torch.
            outputs: the outputs to return; None: all.
            as_dlpack: return objects with `__dlpack__` instead of arrays, on the engine's device
                and without a copy, for `torch.from_dlpack`.  (ONNX Runtime returns bool as uint8
                this way.)
            check_finite: refuse NaN and infinities in the outputs, and values out of range in feeds
                on a GPU, for which the host waits.  (Feeds in CPU memory are always checked.)
            pad_rows: "exact" computes padding as eager does; "zero" skips it and returns zeros, if
                the manifest says that no other row changes (`padding`); None: as in `load`.
            timeout: how many seconds it may take, including the wait for other runs; None: no
                limit.  Only ONNX Runtime's engines can be stopped.

        Returns:
            The outputs by name, as numpy arrays (bfloat16 as `ml_dtypes.bfloat16`).  Their
            `backend` says what computed them.

        Raises:
            InputError: the feeds do not fit the declared inputs, there is no such output, or the
                engine was specialised and the model would take another path.
            VerificationError: an output is not finite.
            MissingError: the outputs alone would take more memory than there is.
            StoppedError: it was canceled, or took longer than `timeout`.
            UsageError: the engine is closed or was loaded before a fork, cannot return zeros for
                padding, or cannot be stopped.

        Examples:
            >>> import enginecast, numpy
            >>> with enginecast.load("linear.bundle") as engine:
            ...     found = engine.run({"input": numpy.zeros((3, 8), "float32")}, timeout=10)
            >>> found["output_0"].dtype, found.backend
            (dtype('float32'), 'onnxruntime-cpu')
        """
        options = (outputs, as_dlpack, check_finite, pad_rows)
        return self._limited(feeds, None, timeout, *options)

    def _limited(
        self,
        feeds: Mapping[str, Any],
        stop: Stop | None,
        timeout: float | None = None,
        outputs: Sequence[str] | None = None,
        as_dlpack: bool = False,
        check_finite: bool = True,
        pad_rows: PadRows | None = None,
    ) -> Outputs:
        """`run`, which `stop` can stop."""
        session = self._open()  # a local name: `close` from another thread lets this run finish
        if timeout is not None:
            self._require_stoppable(session, timeout)
        with self._limits.run(timeout, stop) as stop:
            stopping = session.stopping(stop) if session.can_stop else nullcontext()
            try:
                with stopping:
                    return self._run(session, feeds, outputs, as_dlpack, check_finite, pad_rows)
            except InputError as error:
                if session.can_stop and stop.reason:  # what the runtime says of a stopped run
                    raise StoppedError(f"{self._record.file}: {stop.reason}") from error
                raise

    async def run_async(self, feeds: Mapping[str, Any], **options: Any) -> Outputs:
        """Run the engine in a thread, without blocking the event loop.

        Canceling the task stops the run, if the engine can be stopped, and waits for its end.  Do
        not change the inputs before.

        Args:
            feeds: as `run` takes them.
            **options: as `run` takes them.

        Raises:
            EnginecastError: as `run`.
        """
        import asyncio  # with ssl and sockets, which most who run engines do without

        require_known("run_async", options, _RUN_OPTIONS)
        stop = Stop()
        run = functools.partial(self._limited, feeds, stop, **options)
        running = asyncio.get_running_loop().run_in_executor(None, run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.stop("the task was canceled")
            await asyncio.wait([running])
            with suppress(asyncio.CancelledError, EnginecastError):
                running.result()  # so that nobody reports it as never looked at
            raise

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        run: Callable[[Mapping[str, Any]], Outputs] | None = None,
        **options: Any,
    ) -> Encoded:
        """Run the engine on texts, with the bundle's own tokenizer.

        Args:
            texts: any number; more than the largest batch run as several.
            run: what runs them instead of this engine's `run`, such as that of a `Batcher`.
            options: as `run` takes them, but for `as_dlpack`.

        Returns:
            The outputs by name [texts, ...], and `attention_mask` [texts, tokens] where the engine
            takes one.  Texts that ran in shorter batches end in rows of zeros.

        Raises:
            InputError: the engine does not take texts, or not this many; or its outputs say
                something of a whole batch.
            BundleError: the tokenizer is missing or damaged.
            UsageError: the engine generates text.
            EnginecastError: as `run`.

        Examples:
            >>> import enginecast
            >>> with enginecast.load("t5.bundle") as engine:
            ...     encoded = engine.encode(["a red fox", "rain"])
            >>> encoded["last_hidden_state"].shape[0], encoded.truncated
            (2, 0)
        """
        from enginecast.runtime.prompts import join, require_rows

        require_known("encode", options, _RUN_OPTIONS)
        if options.get("as_dlpack"):
            raise _only_in_cpu_memory("no as_dlpack")
        if self.manifest.generation is not None:
            raise UsageError(
                f"{self.folder}: the engine is a step of a language model, and does not encode",
                hint="`enginecast generate` and `engine.generate(texts)` go on with texts.",
            )
        encoded = self._prompt_encoder([texts] if isinstance(texts, str) else texts)
        if len(encoded.batches) > 1:
            require_rows(self.manifest, len(encoded.batches))
        parts = []
        for feeds in encoded.batches:
            masks = {name: feeds[name] for name in feeds if name == "attention_mask"}
            outputs = self.run(feeds, **options) if run is None else run(feeds)
            parts.append({**outputs, **masks})
        joined = {name: join([part[name] for part in parts]) for name in parts[0]}
        return Encoded(joined, self._backend, encoded.truncated)

    @functools.cached_property
    def _prompt_encoder(self) -> "PromptEncoder":
        from enginecast.runtime.prompts import PromptEncoder

        return PromptEncoder(self.folder, self.manifest, self._tokenizer.get(TOKENIZER_NAME))

    @overload
    def generate(self, texts: str, **options: Any) -> str: ...

    @overload
    def generate(self, texts: Sequence[str], **options: Any) -> list[str]: ...

    def generate(self, texts: str | Sequence[str], **options: Any) -> str | list[str]:
        """Generate text that follows prompts, with the bundle's own tokenizer.

        Args:
            texts: a prompt, or several, which run together.
            **options: `max_new_tokens` (None: until the model ends the text, 256 at most),
                `temperature` (0: greedy), `top_k`, `top_p`, `do_sample` (None: as the model's
                generation config says, unless one of the three before it is given),
                `repetition_penalty` and `seed`, and others of `enginecast.runtime.generate`;
                `chat=True` writes each prompt as the first message of a chat, by the tokenizer's
                own template.

        Returns:
            What follows the prompt, without it; a list for several.

        Raises:
            InputError: a prompt leaves no room for the tokens that were asked for, or is none.
            UsageError: the engine does not generate text, or the bundle has no tokenizer; or an
                option is out of range.
            EnginecastError: as `run`.

        Warns:
            EnginecastWarning: the model's generation config asks for more, such as `num_beams`.

        Examples:
            >>> import enginecast
            >>> with enginecast.load("gpt.bundle") as engine:
            ...     text = engine.generate("a red fox", max_new_tokens=8)
            ...     several = engine.generate(["a red fox", "rain"], max_new_tokens=8)
            >>> text == several[0]
            True
        """
        found = self.text_generator.complete(
            [texts] if isinstance(texts, str) else texts, **options
        )
        return found[0].text if isinstance(texts, str) else [each.text for each in found]

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """Generate text as `generate` does, piece by piece as it is computed.

        Args:
            text: a prompt.
            **options: as `generate` takes them.

        Yields:
            Pieces of whole characters: together they are what `generate` returns.

        Raises:
            EnginecastError: as `generate`, with the first piece.

        Examples:
            >>> import enginecast
            >>> with enginecast.load("gpt.bundle") as engine:
            ...     pieces = list(engine.stream("a red fox", max_new_tokens=8))
            ...     "".join(pieces) == engine.generate("a red fox", max_new_tokens=8)
            True
        """
        for piece in self.text_generator.stream(text, **options):
            if isinstance(piece, str):
                yield piece

    @functools.cached_property
    def text_generator(self) -> "TextGenerator":
        """What `generate` runs, with counts of tokens and why each text ended.

        Raises:
            UsageError: the engine does not generate text, or the bundle has no tokenizer.
        """
        from enginecast.runtime.text_generation import TextGenerator

        return TextGenerator(self, self._tokenizer)

    def cancel(self) -> int:
        """Stop all current runs in other threads; they raise a StoppedError.

        Returns:
            The number of these runs.

        Raises:
            UsageError: the engine is closed, or its runs cannot be stopped.
        """
        self._require_stoppable(self._open(), 1)
        return self._limits.cancel()

    def _require_stoppable(self, session: Session, timeout: float) -> None:
        if not session.can_stop:
            raise UsageError(
                f"{self._record.file}: a run of {self._backend} cannot be stopped",
                hint="Leave timeout out, or run it in a process of its own.",
            )
        if not 0 < timeout < threading.TIMEOUT_MAX:
            raise UsageError(f"timeout: expected seconds, more than 0, got {timeout}")

    def _run(
        self,
        session: Session,
        feeds: Mapping[str, Any],
        outputs: Sequence[str] | None,
        as_dlpack: bool,
        check_finite: bool,
        pad_rows: PadRows | None,
    ) -> Outputs:
        manifest, names = self._bundle.manifest, self._names
        for name in outputs or ():
            if name not in names:
                raise InputError(f"outputs: {name!r} is unknown; expected {', '.join(names)}")
        if outputs is not None and not outputs:
            raise InputError(f"outputs: expected some of {', '.join(names)}, got none")
        wanted = names if outputs is None else tuple(dict.fromkeys(outputs))
        asked = [*wanted, *(guard.output for guard in manifest.guards)]
        checked = check_inputs(
            manifest.inputs,
            manifest.symbols,
            feeds,
            steps=manifest.steps,
            size_checks=manifest.size_checks,
            read_devices=check_finite,
        )
        sizes = (*wanted, *[feed.shape for feed in checked.values()])
        if sizes not in self._small and require_memory(
            manifest, checked, wanted, on_gpu=self._on_gpu
        ):
            self._small = {*self._small, sizes} if len(self._small) < MOST_SMALL else {sizes}
        pad_rows, trimming = pad_rows or self._pad_rows, None
        if pad_rows not in ("exact", "zero"):
            raise UsageError(f"pad_rows: expected exact or zero, got {pad_rows!r}")
        if pad_rows == "zero":
            if any(isinstance(feed, DeviceTensor) for feed in checked.values()):
                raise _only_in_cpu_memory("feeds in CPU memory")
            trimming = self._require_trimming(wanted)
        if as_dlpack:
            if trimming is not None:
                raise _only_in_cpu_memory("no as_dlpack")
            values = session.run(checked, asked)
            for guard in manifest.guards:
                _require(guard, session.to_host(values.pop(guard.output)))
            for name, value in values.items() if check_finite else ():
                if not (lies_on_gpu(value) and can_view() and view(value).is_within(None, None)):
                    self._require_finite(name, session.to_host(value), checked)
            return Outputs(values, self._backend)
        zero, groups = trimming is not None, self._trimming
        if trimming is None and groups is not None and not groups.reason(wanted):
            on_device = any(isinstance(feed, DeviceTensor) for feed in checked.values())
            if not on_device and groups.is_large(checked):
                trimming = groups  # rows without padding run in groups
        if trimming is None:
            found = session.run_to_host(checked, asked)
        else:
            found = trimming.run(
                lambda feeds: session.run_to_host(feeds, asked), checked, zero=zero
            )
        for guard in manifest.guards:
            _require(guard, found.pop(guard.output))
        for name, array in found.items() if check_finite else ():
            self._require_finite(name, array, checked)
        return Outputs(found, self._backend)

    def close(self) -> None:
        """Free the engine's memory once the current runs are done; calling it twice is harmless."""
        self._session = None
        for part in self.parts.values():
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> Session:
        session = self._session
        if session is None:
            raise UsageError(f"{self.folder}: the engine is closed", hint="Load it again.")
        if os.getpid() != self._process:  # threads and locks of runtimes stay behind
            raise UsageError(
                f"{self.folder}: the engine was loaded in another process, which was forked",
                hint="Load it in each process.",
            )
        return session

    def _require_finite(self, name: str, array: Array, feeds: Mapping[str, Feed]) -> None:
        """Refuse an output that is not finite, with what is known of the inputs that made it."""
        if array.dtype.kind in "biu" or is_finite(array):
            return
        finite = np.isfinite(array)
        index = tuple(int(i) for i in np.unravel_index(int((~finite).argmax()), array.shape))
        count = int(array.size - np.count_nonzero(finite))
        spec = next(one for one in self.outputs if one.name == name)
        rows, of_row = "", None
        if spec.shape and any(one.shape[:1] == spec.shape[:1] for one in self.inputs):
            bad = np.flatnonzero(~finite.reshape(len(finite), -1).all(1)).tolist()
            shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            rows, of_row = f", in row {shown} of {spec.shape[0]}", (spec.shape[0], index[0])
        made_by = "; ".join(_described(one, feeds[one.name], of_row) for one in self.inputs)
        raise VerificationError(
            f"output {name!r}: expected finite values, got {count} of {array.size} that are not, "
            f"the first {array[index]} at {list(index)}{rows}; of the first: {made_by}",
            hint="The engine overflows on this input; an engine of higher precision may not."
            " check_finite=False (--allow-non-finite) lets such outputs through.",
        )

    def _require_trimming(self, wanted: Sequence[str]) -> Trimming:
        """Refuse zeros where padding is not known to be without effect."""
        padding, found = self.manifest.padding, self._trimming
        if padding is None:
            masked = any(spec.kind == "attention_mask" for spec in self.inputs)
            reason = "nothing was proved of it" if masked else "no input is an attention mask"
        elif found is None:
            reason = next(f"output {name!r}: {why}" for name, why in padding.reasons.items())
        else:
            reason = found.reason(wanted)
        if found is None or reason:
            raise UsageError(
                f"{self.folder}: pad_rows: padding cannot be left out: {reason}",
                hint='Leave pad_rows out, or pass "exact"; or ask for other outputs.',
            )
        return found


_RUN_OPTIONS = tuple(Engine.run.__kwdefaults__ or ())


def require_known(function: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse an option that a function does not have."""
    for name in options:
        if name not in known:
            raise UsageError(f"{function}: {name!r} is no option; expected {', '.join(known)}")


def arranged(
    names: Sequence[str], feeds: Sequence[Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs of a call by name.

    Args:
        names: in the order of positions.
        feeds: by position, or one mapping by name.
        inputs: by keyword.
    """
    if len(feeds) == 1 and (feeds[0] is None or isinstance(feeds[0], Mapping)):
        given = dict(feeds[0] or {})
    elif len(feeds) <= len(names):
        given = dict(zip(names, feeds, strict=False))
    else:
        known = ", ".join(names)
        raise InputError(
            f"inputs: expected at most {len(names)} by position, {known}, got {len(feeds)}"
        )
    if any(isinstance(each, str) for each in feeds):
        raise InputError("inputs: got text, expected tensors", hint="Texts go to `engine.encode`.")
    if twice := sorted(given.keys() & inputs.keys()):
        raise InputError(f"inputs: {', '.join(map(repr, twice))} was given twice")
    return {**given, **inputs}


def _tensors(feeds: Mapping[str, Any]) -> list[Any]:
    """The inputs that are tensors of torch, which is not imported for it."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return [] if kind is None else [each for each in feeds.values() if isinstance(each, kind)]


def among_gpu(feeds: Mapping[str, Any]) -> bool:
    """Whether one of the inputs is a tensor of torch on a GPU."""
    return any(tensor.is_cuda for tensor in _tensors(feeds))


def as_given(feeds: Mapping[str, Any], outputs: Outputs, specs: Sequence[Output]) -> Outputs:
    """The outputs as tensors of torch where one of the inputs is such a tensor."""
    if not _tensors(feeds):
        return outputs
    from enginecast.runtime.device.torch_values import from_any

    bools = {spec.name for spec in specs if spec.dtype == "bool"}
    made = {n: from_any(value, is_bool=n in bools) for n, value in outputs.items()}
    return Outputs(made, outputs.backend)


def _shown(spec: Input | Output, manifest: Manifest) -> str:
    """Such as "input_ids int64 [batch 1..4, sequence 2..6]"."""
    sizes = []
    for size in spec.shape:
        least_most = manifest.symbols.get(str(size))
        sizes.append(f"{size} {least_most[0]}..{least_most[1]}" if least_most else str(size))
    return f"{spec.name} {spec.dtype} [{', '.join(sizes)}]"


def _described(spec: Input, feed: Feed, of_row: tuple[int | str, int] | None) -> str:
    """An input's shape and values, of the row that is meant where it has such."""
    if not isinstance(feed, np.ndarray):
        return f"{spec.name} {list(feed.shape)}"
    which, values = spec.name, feed
    if of_row is not None and spec.shape[:1] == of_row[:1] and feed.shape[0] > 1:
        which, values = f"{spec.name}[{of_row[1]}]", feed[of_row[1]]
    if values.size == 0 or values.dtype == np.bool_:
        return f"{which} {list(values.shape)}"
    return f"{which} {list(values.shape)} in {values.min():.4g} to {values.max():.4g}"


def _only_in_cpu_memory(wanted: str) -> UsageError:
    return UsageError(
        f"pad_rows: zeros are written in CPU memory: expected {wanted}",
        hint="Take the rows of padding as they are.",
    )


def _require(guard: Guard, holds: Array) -> None:
    """Refuse what the engine computed for inputs with which the model takes another path."""
    if not holds.all():
        raise InputError(
            f"these inputs take another path than the engine, which was specialized: expected "
            f"{guard.value} at {guard.place}\n    {guard.code}",
            hint="Export without --fallback specialise, or on inputs like these.",
        )
