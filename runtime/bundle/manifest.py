"""The schema of a bundle's `manifest.json`.  `manifest_json` writes and reads it."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from enginecast.public import some

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
STATE_NAME = "state.safetensors"
"""What the first call of an engine with state is fed."""
SIGNATURE_NAME = "model.sig"
"""The one file of a bundle that its manifest does not list: see `runtime.bundle.signature`."""
TUNED_SUFFIX = ".tuned.json"
"""Ends the name of what `enginecast tune` chose, a file beside a bundle: see `runtime.tuned`."""
SCHEMA_VERSION = 2
OLDEST_VERSION = 1
"""Without a digest of the manifest's own."""
MAX_MANIFEST_BYTES = 4 << 20
"""A large model has some thousand sites of about 300 bytes; more than this is not a manifest."""

DType = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]
InputKind = Literal[
    "token_ids", "attention_mask", "token_type_ids", "position_ids", "image", "tensor"
]
Precision = Literal["fp32", "fp16", "bf16"]
Outcome = Literal["verified", "verified-by-emulation", "rejected"]
Count = Annotated[int, Meta(ge=0)]
Word = Annotated[str, Meta(max_length=200)]
"""What messages say in passing: a provider, a version, a target."""
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every object in a manifest."""


class Input(Record, frozen=True, kw_only=True):
    """An input of the engines.  A dimension is a number, or the name of a symbol."""

    name: str
    kind: InputKind
    dtype: DType
    shape: tuple[int | str, ...]
    minimum: float | None = None
    """Smallest value allowed (a token id, say); None: any."""
    maximum: float | None = None


class Output(Record, frozen=True, kw_only=True):
    """An output of the engines."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]


class Model(Record, frozen=True, kw_only=True):
    """The model that the bundle was made from."""

    name: str
    fingerprint: dict[str, str]


class Call(Record, frozen=True, kw_only=True):
    """How Python code calls the method that the engines replace.

    What is in a dict or a tuple is called by its path: "added_cond_kwargs.text_embeds".
    """

    model_class: str
    entry: str = "forward"
    inputs: dict[str, str]
    """The input for each path."""
    constants: dict[str, bool | int | float | str] = {}
    """What is part of the engines, by path; numbers that are not finite as text."""
    weights: dict[str, float] = {}
    """A value of some of the model's weights, which tell it from another one of its class."""
    library: str = ""
    """The package that the class is from, and its version: "diffusers 0.42.1"."""


class Site(Record, frozen=True, kw_only=True):
    """A place a pass looked at; an empty reason means that it was rewritten."""

    module: str
    source: str
    ordinal: Count
    reason: str = ""
    note: str = ""


class Rung(Record, frozen=True, kw_only=True):
    """One way that was tried to capture the model; the last one was taken."""

    name: Literal["export", "bake", "strict", "rewrite", "specialise", "torchscript"]
    outcome: Literal["taken", "refused"]
    reason: str = ""
    """Why it was refused, or what it did."""
    place: str = ""
    """FILE:LINE of the culprit."""


class Guard(Record, frozen=True, kw_only=True):
    """An output that is true if the engine took the path that the model would take."""

    output: str
    place: str
    """FILE:LINE of what decides."""
    code: str
    value: str
    """What was read there, such as "True"."""


class SizeCheck(Record, frozen=True, kw_only=True):
    """A condition on input sizes, beyond their ranges."""

    condition: str
    """In Python, with the names of symbols: `height * width != 1369`."""
    place: str = ""
    """FILE:LINE of what decides; empty when it is torch's own."""


class PassRecord(Record, frozen=True, kw_only=True):
    """A pass of the pipeline and what it did."""

    name: str
    spec: str
    rewritten: Count
    sites: tuple[Site, ...] = ()


class Fusion(Record, frozen=True, kw_only=True):
    """The number of fused operators: expected, and found at each stage."""

    kind: str
    expected: Count
    program: Count
    engine: Count
    runtime: Count | None = None
    """Count in the graph as the runtime optimized it; None: not looked at."""
    missing: tuple[str, ...] = ()


Clean = Literal["none", "strip", "lower-strip", "whitespace", "empty-is-space", "quoted"]


class TextForm(Record, frozen=True, kw_only=True):
    """What a text is made before it is tokenized; see `runtime.text_form`."""

    template: str = "{}"
    """What a text is put into, in place of the braces."""
    clean: Clean = "none"
    """What is done to it before that."""
    special_tokens: bool = True
    """Whether the tokenizer adds its own tokens, such as one for the end."""
    keep_end: bool = False
    """Whether what the template has behind the text is tokenized by itself, and never cut."""


class Text(TextForm, frozen=True, kw_only=True):
    """How prompts become token ids."""

    padding_id: Count
    max_length: Annotated[int, Meta(ge=1)]
    padding_side: Literal["right", "left"] = "right"


class Padding(Record, frozen=True, kw_only=True):
    """Whether valid rows stay the same when columns of padding are cut off.

    It was proved on the program, for masks of zeros and ones with a valid token in each row.
    """

    mask: str
    """The input that marks valid tokens: [batch, tokens]."""
    side: Literal["right", "any", "none"]
    """Where the padding may be: after the tokens of a row, anywhere, or no output was proved."""
    outputs: tuple[str, ...] = ()
    """Those that stay the same; their tokens, where they have any, are dimension 1."""
    reasons: dict[str, str] = {}
    """Why nothing is known of the others, by name."""


class Downgrade(Record, frozen=True, kw_only=True):
    """What engines lack of what was asked for, or of what an export offers by default."""

    kind: Literal["engine", "passes", "precision", "sizes", "branch", "output", "component"]
    text: str
    option: str = ""
    """What accepts it, or asks for just that, such as "--dynamic x:1=16"; empty: nothing does."""
    consent: Literal["not needed", "given", "missing"]
    """"not needed": it was only offered; "missing": it was asked for, and the bundle was kept as
    `DIR.rejected`."""


class State(Record, frozen=True, kw_only=True):
    """State between calls: an output that becomes an input of the next call."""

    input: str
    output: str
    grows: Count | None = None
    """The dimension in which each call appends to it, from nothing on; None: its shape stays."""
    start: str = ""
    """The tensor in `state.safetensors` that the first call is fed; empty: one without elements."""


class GenerationCheck(Record, frozen=True, kw_only=True):
    """The comparison of an engine that generates text with the model's `generate`."""

    prompts: Count
    steps: Count
    """Tokens that were generated for each prompt."""
    ties: Count = 0
    """Tokens that differ where the model's own two are as good as equal; it was followed there."""
    error: float
    """Relative L2 error of the logits of all steps, against fp64."""
    floor: float
    """That of the model itself, in the engine's dtype."""
    own: Literal["", "same", "new tokens", "other"] = ""
    """What `generate` of the model's class returned where that is not transformers' own: the same,
    the new tokens without what the decoder reads first, or something else."""


class StepCheck(Record, frozen=True, kw_only=True):
    """The comparison of an engine with its module over consecutive calls with state."""

    calls: Count
    error: float
    """Relative L2 error against fp64, of the output that is worst beside the floor."""
    floor: float
    """That of the model itself, which keeps its own state, in the engine's dtype."""


class Generation(Record, frozen=True, kw_only=True):
    """How text is generated with the engines, step by step."""

    task: Literal["text-generation"]
    padding_id: Count | None = None
    ending_ids: tuple[Count, ...] = ()
    do_sample: bool = False
    """What the model's generation config asks for, as the four after it."""
    temperature: float = 1.0
    top_k: Count | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    encoder: str = ""
    """The part whose outputs are inputs of the decoder, by the same names; empty: there is none."""
    start_ids: tuple[Count, ...] = ()
    """What the decoder reads first; empty: the prompts."""
    suppress_ids: tuple[Count, ...] = ()
    """Never generated."""
    begin_suppress_ids: tuple[Count, ...] = ()
    """Not generated first."""
    forced_first_ids: tuple[Count, ...] = ()
    """The token that follows a start of one token; empty: any."""
    forced_last_ids: tuple[Count, ...] = ()
    """Of which one is the last token that may be generated."""
    restarts: tuple[Count, ...] = ()
    """Tokens before a step where `generate` drops the cache, and reads all tokens again."""
    not_heeded: tuple[str, ...] = ()
    """What else of that config changes the tokens, by name: engines do not heed it."""
    checked: GenerationCheck | None = None


class Where(Record, frozen=True, kw_only=True):
    """Where a verdict was reached: hardware and software."""

    provider: Word
    device: Word
    versions: dict[str, str]


class OutputVerdict(Record, frozen=True, kw_only=True):
    """How one output agrees with eager.

    None: not finite or not defined, such as the SQNR of equal tensors.
    """

    name: str
    error: float | None
    floor: float | None
    ratio: float | None
    limit: float | None
    cosine: float | None = None
    sqnr_db: float | None = None
    max_abs: float | None = None
    pad_error: float | None = None
    prompts: Count = 0
    """Prompts compared; 0 for an output that follows no mask."""
    prompt_cosine: float | None = None
    """Smallest cosine of a prompt's mean over its valid tokens."""
    prompt_errors: tuple[float | None, ...] = ()
    """Relative L2 error of each prompt that was given, over its valid tokens, in their order."""
    prompt_cosines: tuple[float | None, ...] = ()
    """Likewise the smallest cosine of a token, or of the one row of the prompt."""
    kernels: bool = False
    """Whether the floor counts what the backend's own kernels may lose, and eager's do not."""


class Excess(Record, frozen=True, kw_only=True):
    """An error that is larger than what eager's, or that of other kernels, allows."""

    output: str
    case: str = ""
    """Empty: all cases together."""
    error: float
    """Relative."""
    limit: float
    place: str = ""
    """The op in which most of it arises, where that is known."""
    accepted: str = ""
    """What accepted it: OUTPUT or OUTPUT/CASE; empty: nothing did, and the engine was rejected."""
    bound: float | None = None
    """The largest error that later comparisons accept."""


class Verdict(Record, frozen=True, kw_only=True):
    """Whether an engine agrees with eager, and the evidence."""

    outcome: Outcome
    engine: Literal["ran", "not run on target"]
    where: Where
    outputs: tuple[OutputVerdict, ...] = ()
    cases: tuple[str, ...] = ()
    errors: dict[str, float] = {}
    """Of a quantized engine, the largest relative error of a row in each case."""
    max_error: float | None = None
    """What `--max-error` allowed a row of an engine that is not quantized; None: no such limit."""
    reasons: tuple[str, ...] = ()
    arithmetic: Word = ""
    """The profile that the program was emulated in, such as "ort-cuda"; empty: it was not."""
    excesses: tuple[Excess, ...] = ()
    """Errors beyond their limits; of an engine that was not rejected, each was accepted."""

    def __repr__(self) -> str:
        """The outcome, where it was reached, and what is wrong."""
        wrong = f": {some(self.reasons, 1)}" if self.reasons else ""
        return f"Verdict({self.outcome}, {self.where.provider}, {len(self.cases)} cases{wrong})"

    @property
    def accepted(self) -> tuple[Excess, ...]:
        """The errors that a user accepted by name."""
        return tuple(excess for excess in self.excesses if excess.accepted)


class ShapeRange(Record, frozen=True, kw_only=True):
    """The shapes of an input that a TensorRT engine was built for."""

    name: str
    profile: Count = 0
    """Number of the optimization profile that has them."""
    least: tuple[int, ...]
    optimal: tuple[int, ...]
    """What it was tuned for."""
    greatest: tuple[int, ...]


QuantizedFormat = Literal["", "fp8", "int8", "int4", "nvfp4", "mxfp8"]
"""The formats of quantized values in an engine; ONNX Runtime's int4 is among its int8."""


def profile_of(profile: Sequence[ShapeRange], shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The number of the optimization profile that a run takes: the first that has the shapes.

    Args:
        profile: as `EngineRecord.profile` has it.
        shapes: of the inputs, by name.

    Returns:
        None: no profile has them.
    """
    for number in sorted({one.profile for one in profile}):
        if all(
            low <= size <= high
            for one in profile
            if one.profile == number
            for low, size, high in zip(one.least, shapes[one.name], one.greatest, strict=True)
        ):
            return number
    return None


class EngineRecord(Record, frozen=True, kw_only=True):
    """One engine of a bundle."""

    target: Word
    file: Word
    precision: Precision
    verdict: Verdict
    weights: str | None = None
    opset: Count | None = None
    domains: dict[str, int] = {}
    minimum_runtime: Word = ""
    """Such as "onnxruntime>=1.28"; empty: any."""
    providers: tuple[Word, ...] = ()
    arch: Word | None = None
    quantized: QuantizedFormat = ""
    """What is quantized in the engine, of several formats the narrowest: ONNX Runtime needs options
    for it."""
    requires: dict[str, str] = {}
    """What the engine asks of the machine that runs it: see `runtime.device.fitness` of machine
    code, and `runtime.sessions.integer_sums`."""
    regions: dict[str, Count] = {}
    """How many equal modules the machine code of one stands for, by the path of the first."""
    profile: tuple[ShapeRange, ...] = ()
    """Of a TensorRT engine: of all its optimization profiles."""
    built_by: Word = ""
    """What built machine code that did not run where it was built, such as
    "TensorRT-RTX 1.7.1.116"."""
    network: str | None = None
    """The ONNX file that a TensorRT engine without weights is filled from; its weights are in the
    file that `weights` names."""


class Quantization(Record, frozen=True, kw_only=True):
    """A summary of what is quantized in the engines; the plan has each layer."""

    precision: str
    """As it was asked for, such as "int8-storage"."""
    format: Literal["fp8", "int8"]
    arch: str
    max_error: float
    """Largest relative L2 error of a row of an output that was allowed."""
    least_cosine: float | None = None
    """Smallest cosine of a row that follows from it."""
    predicted_error: float | None = None
    plan: str
    """Name of the file."""


class Part(Record, frozen=True, kw_only=True):
    """A bundle within the bundle, in a folder of its own, such as the encoder of a decoder."""

    name: str
    sha256: Digest
    """Of its manifest, which has the digests of its files."""
    becomes: Digest | UnsetType = UNSET
    """While a verdict is written into it: the digest of its next manifest, which is right, too."""


class FileRecord(Record, frozen=True, kw_only=True):
    """A file of the bundle, as it was when published."""

    name: str
    size: Count
    sha256: Digest


class Manifest(Record, frozen=True, kw_only=True):
    """All that a bundle says about itself."""

    schema_version: int = SCHEMA_VERSION
    enginecast: Word
    model: Model
    inputs: tuple[Input, ...]
    symbols: dict[str, tuple[int, int]]
    """Least and greatest size of each symbolic dimension."""
    steps: dict[str, Count] = {}
    """Symbols whose sizes are multiples of a number, and that number."""
    outputs: tuple[Output, ...]
    kept: tuple[Output, ...] = ()
    """Values inside that engine files give, too, so that no kernel computes across them; `run` does
    not."""
    outputs_chosen: bool = False
    """Whether a user chose the outputs; else they are all that the model gives."""
    capture: tuple[Rung, ...] = ()
    """How the model was captured, and what was tried before."""
    guards: tuple[Guard, ...] = ()
    """What has to hold of the inputs; the runtime refuses others."""
    size_checks: tuple[SizeCheck, ...] = ()
    """What has to hold of the symbols; the runtime refuses other sizes."""
    pipeline: str
    precision: Precision
    """What the engines compute in, but for what is quantized."""
    quantization: Quantization | None = None
    passes: tuple[PassRecord, ...] = ()
    fusion: tuple[Fusion, ...] = ()
    text: Text | None = None
    padding: Padding | None = None
    """None: no input is a mask."""
    notes: tuple[str, ...] = ()
    """What a user of the engine should know, such as that its format is deprecated."""
    downgrades: tuple[Downgrade, ...] = ()
    """What the engines lack, a line each."""
    states: tuple[State, ...] = ()
    """Outputs that a caller feeds as inputs of the next call."""
    stepped: StepCheck | None = None
    """Of an engine whose state was in buffers of the model."""
    generation: Generation | None = None
    call: Call | None = None
    """None: the model is a program, and no class."""
    engines: tuple[EngineRecord, ...]
    files: tuple[FileRecord, ...] = ()
    """Every file of the bundle but the manifest."""
    parts: tuple[Part, ...] = ()
    """Bundles that are folders of this one; they have none themselves."""

    def __repr__(self) -> str:
        """The model, the signature's names and the engines."""
        inputs, outputs = (some(each.name for each in of) for of in (self.inputs, self.outputs))
        engines = some(each.target for each in self.engines)
        return f"Manifest({self.model.name}: {inputs} -> {outputs}; {engines})"

    @property
    def asked_precision(self) -> str:
        """As a user calls it: "fp16", "int8-storage"."""
        return self.precision if self.quantization is None else self.quantization.precision

    @property
    def arithmetic(self) -> str:
        """What eager was run in to judge the engines: "fp16", "fp32+int8"."""
        if self.quantization is None:
            return self.precision
        return f"{self.precision}+{self.quantization.format}"

    @property
    def engine_outputs(self) -> tuple[Output, ...]:
        """The outputs of an engine file, including the guards and what is kept."""
        guards = [Output(name=guard.output, dtype="bool", shape=()) for guard in self.guards]
        return (*self.outputs, *guards, *self.kept)


def is_file_name(name: str) -> bool:
    """Whether `name` may be a file of a bundle: no separators, no leading dot, plain ASCII."""
    return _FILE_NAME.fullmatch(name) is not None
