"""The contents of a report: plain data, filled by the compiler, printed and written by `report`.

Data that grows with the model is capped where it is collected, with the number left out; the build
log has all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from enginecast.runtime.bundle.manifest import Downgrade, Fusion, Input, Output, Verdict
from enginecast.verification.emulate.data import Emulation
from enginecast.verification.report.speed import Speed

SCHEMA_VERSION = 2
"""Version of `report.json`; version 1 lacked this number and the fields added with it."""


@dataclass(frozen=True)
class SiteGroup:
    """The sites of a pass with the same outcome."""

    reason: str
    """Why they were left alone; empty: they were rewritten."""
    note: str
    count: int
    places: tuple[str, ...]
    """Module and source of the first sites."""


@dataclass(frozen=True)
class GraphNode:
    """One op of a program, as it is drawn."""

    name: str
    """Name of the FX node."""
    op: str
    """"rms_norm"; "input" for a value that comes from elsewhere."""
    value: str
    """"f32[s0, 64]"."""
    inputs: tuple[int, ...]
    """Indices of the nodes that it reads, without weights."""
    weights: tuple[str, ...]
    """Weights that it reads."""
    module: str
    source: str
    state: Literal["same", "edited", "new", "gone"]
    """Compared with the other side of the pass."""
    is_read_elsewhere: bool
    """Whether nodes that are not drawn read it."""


@dataclass(frozen=True)
class Drawing:
    """A part of a program on both sides of a pass."""

    module: str
    before: tuple[GraphNode, ...]
    after: tuple[GraphNode, ...]
    similar: int
    """Modules of the same kind that the pass changed, this one included."""
    left_out: int
    """Nodes of the module that are not drawn."""


@dataclass(frozen=True)
class PassDetails:
    """The sites of a pass, and its changes to the program."""

    sites: tuple[SiteGroup, ...] = ()
    sites_left_out: int = 0
    """Number of sites in groups that are left out."""
    diff: str = ""
    """First lines of the diff of the program's text."""
    diff_left_out: int = 0
    """Lines."""
    drawings: tuple[Drawing, ...] = ()
    drawings_left_out: int = 0
    """Number of other kinds of modules that it changed."""


@dataclass(frozen=True)
class PassCheck:
    """One pass: what it did, and the result of the comparison."""

    name: str
    promise: str
    rewritten: int
    left_alone: int
    seconds: float
    """Time of the pass."""
    check_seconds: float
    """Time of the comparison."""
    worst_place: str
    """Module path, or "output 'NAME'": the first failing place, or the one with the largest error
    in floors."""
    worst_source: str
    worst_error: float | None
    """None: values there are infinite or NaN, but finite in fp64."""
    worst_ratio: float | None
    """Error over floor; 0 for a value that is bit-equal; None as above."""
    modules: Mapping[str, float | None] = field(default_factory=dict)
    """Module path -> relative L2 error against fp64 after the pass; for "exact" the change from
    before; None as above."""
    moved: tuple[str, ...] = ()
    """Modules whose last value became another one in this pass."""
    failure: str = ""
    """Why the pass broke its promise; empty if it did not."""
    details: PassDetails | None = None


@dataclass(frozen=True)
class PlannedLayer:
    """The decision of a quantization plan for one layer."""

    module: str
    kind: str
    shape: tuple[int, ...]
    """Of the weight."""
    choice: str
    bits: int
    scaling: str
    """What shares one scale in the weight."""
    activations: str
    """What shares one scale in what the layer reads; empty: that is not quantized."""
    bytes_before: int
    """Bytes of the weight in the engine without the plan."""
    bytes: int
    """Bytes with the plan, scales included."""
    error: float | None
    """Relative L2 error of the layer's output."""
    end_to_end: float | None
    """Relative L2 error of the worst output row with only this layer quantized."""
    gain: float | None
    """Speedup: time of the unquantized layer over the time as chosen."""
    gain_from: str
    """"measured", "model" or empty."""
    reason: str


@dataclass(frozen=True)
class Plan:
    """A quantization plan, as it is shown."""

    format: str
    arch: str
    max_error: float
    predicted_error: float | None
    layers: tuple[PlannedLayer, ...]


@dataclass(frozen=True)
class LayerTime:
    """The ops of one kind in one module of an engine, as its runtime timed them."""

    module: str
    """Empty: of no module, or the model itself."""
    op: str
    nodes: int
    microseconds: float
    """Total time in one run: the median over the runs."""


@dataclass(frozen=True)
class Profile:
    """The time of an engine, by layer."""

    provider: str
    runs: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of the inputs."""
    layers: tuple[LayerTime, ...]
    """In the order of their first run."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a module, as the engine stores them."""

    module: str
    """A module; of a model with very many, a block of them."""
    precision: str
    """"fp32", "int8", "int4-storage": as weights, and as factors of products where it is no
    storage."""
    bytes: int
    """Scales included."""


@dataclass(frozen=True)
class Origin:
    """The origin of the report: what made it, when, and from which model."""

    enginecast: str
    date: str
    """UTC date in ISO 8601; from SOURCE_DATE_EPOCH if it is set."""
    command: str
    """The command line; empty: it was made from Python, or as part of a pipeline."""
    python: str
    platform: str
    fingerprint: Mapping[str, str]
    """sha256 of the model's parts."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of the installed packages, by name."""


@dataclass(frozen=True)
class Report:
    """The report of an export or a verification."""

    model: str
    target: str
    precision: str
    pipeline: str
    verdict: Verdict
    floor_dtype: str
    passes: tuple[PassCheck, ...] = ()
    emulation: Emulation | None = None
    """The program in the arithmetic of the target; None for fp32."""
    fusions: tuple[Fusion, ...] = ()
    left_out: tuple[str, ...] = ()
    """Cases that were verified but are not stored in the bundle."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Step -> time: capture, passes, lower, verify, ..."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Step -> peak bytes of memory that no file backs; 0 if the system does not report it."""
    notes: tuple[str, ...] = ()
    downgrades: tuple[Downgrade, ...] = ()
    """What the engines lack of what was asked for, or offered."""
    layers: tuple[str, ...] = ()
    """What the engine consists of, as its runtime reports it: fusions that were kept, dtypes."""
    others: Mapping[str, Verdict] = field(default_factory=dict)
    """Verdicts on further engines in the bundle, by target."""
    speed: str = ""
    """Speed of the engine compared with eager on the machine of the export; empty: not timed."""
    timed: Speed | None = None
    """The same in numbers, and beside the fp32 engine."""
    schema_version: int = 1
    """Version of this file; new files have `SCHEMA_VERSION`."""
    origin: Origin | None = None
    plan: Plan | None = None
    profile: Profile | None = None
    """None: the engine was not profiled."""
    more_profiles: tuple[Profile, ...] = ()
    """The same at other sizes."""
    size: int = 0
    """Bytes of the first engine and its weights."""
    nodes: int = 0
    """Number of nodes in the first engine."""
    file: str = ""
    """Name of the first engine's file in the bundle; empty: there is no bundle."""
    model_class: str = ""
    weights: str = ""
    """"the model's own", or "random (seed 0)"."""
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    symbols: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Least and greatest size of each symbolic dimension."""
    stored: tuple[StoredWeights, ...] = ()
    """In the order of execution; empty: not known."""
    prompts: tuple[str, ...] = ()
    """Beginnings of the prompts that were given, in the order of `OutputVerdict.prompt_errors`."""
