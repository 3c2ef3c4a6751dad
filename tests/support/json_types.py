"""What `--json` prints, command by command: the sources of the published schemas."""

from typing import Any, Literal, NotRequired, TypedDict

from enginecast.runtime.bundle.manifest import (
    Downgrade,
    Fusion,
    Guard,
    Quantization,
    Rung,
    ShapeRange,
    SizeCheck,
    Verdict,
)
from enginecast.runtime.sessions.settings import Settings
from enginecast.runtime.tuned import Machine
from enginecast.verification.emulate.data import Emulation

Shapes = dict[str, list[int]]
Outcome = Literal["verified", "verified-by-emulation", "rejected"]


class Error(TypedDict):
    error: str
    message: str
    hint: str
    control_flow: NotRequired[list[dict[str, Any]]]
    violations: NotRequired[list[str]]


class Completion(TypedDict):
    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    finish_reason: Literal["stop", "length"]


class Generate(TypedDict):
    completions: list[Completion]
    backend: str
    verdict: Outcome
    seconds: float


class Component(TypedDict):
    component: str
    folder: str
    eager: NotRequired[str]
    exit_code: NotRequired[int]
    result: NotRequired[dict[str, Any]]


class Components(TypedDict):
    pipeline: str
    components: list[Component]


class CaseMilliseconds(TypedDict):
    engine: float
    eager: float
    fp32: NotRequired[float]


class SpeedCase(TypedDict):
    eager: float
    quartiles: list[float]
    fp32: float | None
    fp32_quartiles: list[float] | None
    rounds: int
    shapes: Shapes
    milliseconds: CaseMilliseconds


class Speed(TypedDict):
    eager: float
    quartiles: list[float]
    fp32: float | None
    fp32_quartiles: list[float] | None
    rounds: int
    shapes: Shapes
    cases: list[SpeedCase]
    precision: str
    threads: int
    busy: bool
    cpu: str
    advice: str
    slower_than_fp32: str
    without_fp32: str


class Memory(TypedDict):
    anonymous: int
    peak: int
    steps: dict[str, int]


class EngineFile(TypedDict):
    target: str
    file: str
    outcome: Outcome


class SiteName(TypedDict):
    module: str
    source: str
    ordinal: int


class ModuleLoss(TypedDict):
    module: str
    source: str
    error: float
    isolated: float | None
    off: bool
    arises_here: bool


class GuiltySite(SiteName):
    error: ModuleLoss | None


CulpritJSON = TypedDict(
    "CulpritJSON",
    {
        "pass": str,
        "position": int,
        "promise": str,
        "failure": str,
        "rewritten": int,
        "sites": list[GuiltySite],
        "undecided": list[SiteName],
        "module": ModuleLoss | None,
        "reason": str,
        "skip_modules_pattern": str,
        "skip_modules_pattern_helps": bool | None,
    },
)


class Bisected(TypedDict):
    culprits: list[CulpritJSON]
    drop_guilty_helps: bool
    left_out: int
    trials: int
    modules: list[ModuleLoss]


class PassOutcome(TypedDict):
    name: str
    promise: str
    rewritten: int
    failure: str


class Bisect(Bisected):
    guilty: bool
    pipeline: str
    precision: str
    reasons: list[str]
    lines: list[str]
    passes: list[PassOutcome]
    seconds: dict[str, float]


class ComparedLine(TypedDict):
    name: str
    one: Any
    other: Any
    differs: bool
    worse: bool


class Compared(TypedDict):
    one: str
    other: str
    same_model: bool | None
    warnings: list[str]
    groups: dict[str, list[ComparedLine]]
    page: NotRequired[str]


class Export(TypedDict):
    outcome: Outcome
    engine: str
    bundle: str | None
    rejected: str | None
    verdict: Verdict
    precision: str
    pipeline: str
    emulation: Emulation | None
    fusions: list[Fusion]
    notes: list[str]
    downgrades: list[Downgrade]
    layers: list[str]
    nodes: int
    ops: dict[str, int]
    size: int
    seconds: dict[str, float]
    memory: Memory
    capture: NotRequired[list[Rung]]
    guards: NotRequired[list[Guard]]
    size_checks: NotRequired[list[SizeCheck]]
    quantization: NotRequired[Quantization | None]
    engines: NotRequired[list[EngineFile]]
    bisection: Bisected | None
    dropped: list[CulpritJSON]
    speed: Speed | None


class Verify(TypedDict):
    outcome: Outcome
    engine: str
    verdict: Verdict
    against: str
    completed: bool
    notes: list[str]
    backend: str
    layers: list[str]


class Run(TypedDict):
    outputs: Shapes
    output: str
    provider: str
    backend: str
    verdict: str
    truncated: int
    settings: Settings


class BenchRow(TypedDict):
    ms: float
    quartiles_ms: list[float]
    cpu_ms: float
    samples_ms: list[float]
    speed: float
    items_per_second: float
    memory_bytes: int
    cosine: float | None
    relative_error: float | None


class BenchMachine(TypedDict):
    system: str
    processor: str
    cores: int
    python: str
    versions: dict[str, str]


class Bench(TypedDict):
    rows: dict[str, BenchRow]
    base: str
    absent: list[str]
    inputs: str
    shapes: list[Shapes]
    compared_with: str | None
    backend: str
    threads: int | None
    settings: Settings
    notes: list[str]
    machine: BenchMachine


class TuneRow(TypedDict):
    settings: Settings
    ms: NotRequired[float]
    quartiles_ms: NotRequired[list[float]]
    cpu_ms: NotRequired[float]
    speed: NotRequired[float]
    quartiles_speed: NotRequired[list[float]]
    rounds: NotRequired[int]
    cosine: float | None
    relative_error: float | None
    rejected: str | None


class OtherRow(TuneRow):
    backend: str


class Tune(TypedDict):
    rows: list[TuneRow]
    others: list[OtherRow]
    chosen: TuneRow
    file: str | None
    backend: str
    inputs: str
    shapes: list[Shapes]
    notes: list[str]
    machine: Machine


class Site(TypedDict):
    node: str
    module: str
    source: str
    reason: str
    note: str


class OptPass(TypedDict):
    name: str
    rewritten: int
    seconds: float
    failure: str
    worst_place: str
    worst_error: float
    worst_ratio: float
    sites: list[Site]
    diff: NotRequired[str]


class Opt(TypedDict):
    output: str | None
    passes: list[OptPass]
    ir: NotRequired[str]


class Reduced(TypedDict):
    """Of `opt --reduce`."""

    script: str
    failure: str
    nodes: int
    left: int
    trials: int
    finished: bool
    shown: str
    # "pass" is a word of Python: the schema adds it.


class PassInfo(TypedDict):
    name: str
    package: str
    summary: str
    promise: str
    after: list[str]
    options: dict[str, str]


class BrokenPass(TypedDict):
    name: str
    where: str
    package: str
    reason: str


class Passes(TypedDict):
    passes: list[PassInfo]
    broken: list[BrokenPass]


class DiffusersRun(TypedDict):
    output: str
    files: list[str]


class CacheFillCounts(TypedDict):
    cache: str
    name: str
    texts: int
    unique: int
    cached_before: int
    truncated: int


class Failed(TypedDict):
    text: str
    tokens: int
    reason: str


class Filled(CacheFillCounts):
    stored: int
    stored_by_others: int
    failed: list[Failed]
    bytes: int
    seconds: float
    texts_per_second: float
    tokens_per_second: float


class TokensOfText(TypedDict):
    least: int
    median: float
    most: int


class Estimated(CacheFillCounts):
    dry_run: Literal[True]
    to_encode: int
    tokens: int
    tokens_per_text: TokensOfText
    bytes: int
    disk_bytes: int
    shards: int
    seconds: float


class Signed(TypedDict):
    signature: str


class TrustedBundle(TypedDict):
    sha256: str
    folder: str


class Trust(TypedDict):
    store: str
    trusted: list[TrustedBundle]


class Leftover(TypedDict):
    path: str
    target: str
    kind: str
    bytes: int
    seconds: float
    in_use: bool
    action: str
    done: bool


class DoctorFolder(TypedDict):
    folder: str
    leftovers: list[Leftover]


class Operator(TypedDict):
    count: int
    support: str


class NetworkCheck(TypedDict):
    version: str
    library: str
    parsed: bool
    ready: bool
    run: str
    operators: dict[str, Operator]
    violations: list[dict[str, Any]]
    unknown_sizes: int
    profile: list[ShapeRange]
