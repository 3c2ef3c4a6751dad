"""Reports for tests: a small one, and one that has everything."""

from dataclasses import replace

import msgspec

from enginecast.runtime.bundle.manifest import (
    Fusion,
    Input,
    Outcome,
    Output,
    OutputVerdict,
    Verdict,
    Where,
)
from enginecast.verification.report.data import (
    Drawing,
    GraphNode,
    LayerTime,
    Origin,
    PassCheck,
    PassDetails,
    Plan,
    PlannedLayer,
    Profile,
    Report,
    SiteGroup,
    StoredWeights,
)
from enginecast.verification.report.speed import Speed, SpeedAt


def report(outcome: Outcome = "verified", reasons: tuple[str, ...] = ()) -> Report:
    return Report(
        model="t5 <small> & [bold]",
        target="onnxruntime",
        precision="bf16",
        pipeline="canonicalize,unify-dtype{to=bf16}",
        floor_dtype="bf16",
        verdict=Verdict(
            outcome=outcome,
            engine="ran",
            where=Where(provider="CUDAExecutionProvider", device="sm90", versions={"torch": "2"}),
            outputs=(
                OutputVerdict(
                    name="last_hidden_state",
                    error=5.5e-3,
                    floor=5e-3,
                    ratio=1.1,
                    limit=3.0,
                    cosine=0.99998,
                    sqnr_db=45.2,
                    max_abs=0.1,
                    prompts=64,
                    prompt_cosine=0.99999,
                ),
                OutputVerdict(name="ids", error=None, floor=None, ratio=None, limit=None),
            ),
            cases=("long", "empty prompt"),
            reasons=reasons,
        ),
        passes=(
            PassCheck(
                name="fuse-rms-norm",
                promise="reordered",
                rewritten=9,
                left_alone=1,
                seconds=0.2,
                check_seconds=0.1,
                worst_place="encoder.block.1",
                worst_source="modeling_t5.py:66",
                worst_error=2.5e-7,
                worst_ratio=1.2,
                modules={"encoder.block.0": 1e-7, "encoder.block.1": 2.5e-7},
                moved=("encoder.block.0.layer.0",),
            ),
            PassCheck("canonicalize", "exact", 3, 0, 0.1, 0.1, "encoder", "", 0.0, 0.0),
        ),
        fusions=(
            Fusion(
                kind="rms norm",
                expected=9,
                program=8,
                engine=8,
                missing=("encoder.block.0: a cast between rsqrt and mul",),
            ),
        ),
        left_out=("largest",),
        seconds={"capture": 4.6},
        notes=("a note",),
    )


def node(index: int, inputs: tuple[int, ...], state: str = "new") -> GraphNode:
    return GraphNode(
        name=f"linear_{index}",
        op="linear" if inputs else "input",
        value="f32[s0, s1, 512]",
        inputs=inputs,
        weights=("encoder.block.0.wi.weight",) if inputs else (),
        module=f"encoder.block.{index}",
        source="modeling_t5.py:66",
        state=state,  # type: ignore[arg-type]
        is_read_elsewhere=index % 3 == 0,
    )


def planned(index: int) -> PlannedLayer:
    is_kept = index % 3 == 0
    return PlannedLayer(
        module=f"encoder.block.{index}.layer.1.DenseReluDense.wi_0",
        kind="linear",
        shape=(10240, 4096),
        choice="keep" if is_kept else "w8a8-dynamic",
        bits=8,
        scaling="row",
        activations="" if is_kept else "row",
        bytes_before=10240 * 4096 * 4,
        bytes=10240 * 4096 * (4 if is_kept else 1),
        error=None if is_kept else 1.1e-2 * (1 + index % 7),
        end_to_end=3e-4,
        gain=None if is_kept else 2.4,
        gain_from="model",
        reason="not within max_error: " * 9,
    )


def slow_at(gain: float | None, quartiles: tuple[float, float] | None = None) -> SpeedAt:
    """Some times as fast as the fp32 engine."""
    times = {"engine": 0.2, "eager": 2.6} | ({} if gain is None else {"fp32": 0.1})
    return SpeedAt(13.0, (12.0, 14.0), 4, {"ids": (1, 10)}, times, gain, quartiles)


def full(blocks: int = 6, passes: int = 5) -> Report:
    """A report with everything, of a model of so many blocks."""
    names = [f"encoder.block.{b}.{part}" for b in range(blocks) for part in ("q", "k", "o", "wi")]
    graph = (node(0, ()), *(node(i, (i - 1, i // 2)) for i in range(1, 30)))
    details = PassDetails(
        sites=tuple(
            SiteGroup("", f"note {i}", 9, tuple(f"{n} modeling_t5.py:66" for n in names[:24]))
            for i in range(10)
        ),
        diff="\n".join(["@@ -1 +1 @@", "-%a: f32[s0, s1] = aten.mul", "+%b: f32[s0]" + "x" * 200]),
        diff_left_out=4000,
        drawings=(Drawing("encoder.block.0", graph, graph[:5], blocks, 7),) * 2,
    )
    checks = [
        PassCheck(
            name=f"pass-{index}",
            promise="reordered",
            rewritten=9,
            left_alone=1,
            seconds=0.2,
            check_seconds=0.1,
            worst_place=names[0],
            worst_source="modeling_t5.py:66",
            worst_error=None if index > 2 else 1e-5,
            worst_ratio=None if index > 2 else 1.0,
            modules={
                name: None if index > 2 and at > 9 else 1e-8 * (1 + at % 90) * 10**index
                for at, name in enumerate(names)
            },
            details=details,
        )
        for index in range(passes)
    ]
    first, *others = report().verdict.outputs
    first = msgspec.structs.replace(
        first, prompt_errors=(2e-3, None, 6e-3), prompt_cosines=(0.999, None, 0.98)
    )
    return replace(
        report(),
        verdict=msgspec.structs.replace(report().verdict, outputs=(first, *others)),
        prompts=("a red fox", "two <cats> & a dog", "rain"),
        file="engine.onnx",
        nodes=70,
        model_class="T5EncoderModel",
        weights="random (seed 3)",
        inputs=(
            Input(
                name="input_ids",
                kind="token_ids",
                dtype="int64",
                shape=("batch", 77),
                minimum=0,
                maximum=255,
            ),
        ),
        outputs=(Output(name="last_hidden_state", dtype="float16", shape=("batch", 77, 64)),),
        symbols={"batch": (1, 64)},
        stored=tuple(
            StoredWeights(name, "int8" if name.endswith("q") else "fp32", 4096) for name in names
        ),
        timed=Speed(
            (slow_at(0.53),),
            "bf16",
            threads=2,
            cpu="AVX2",
            advice="use --precision fp32 on this machine",
        ),
        passes=tuple(checks),
        plan=Plan("int8", "cpu", 0.1, 0.05, tuple(map(planned, range(7 * blocks)))),
        profile=Profile(
            "CPUExecutionProvider",
            5,
            {"input_ids": (2, 77)},
            tuple(LayerTime(name, op, 3, 41.5) for name in names for op in ("MatMul", "Softmax")),
        ),
        origin=Origin(
            enginecast="0.1.0",
            date="2026-01-02T03:04:05+00:00",
            command="enginecast export ./t5 -o t5.bundle",
            python="3.11.7",
            platform="Linux",
            fingerprint={"weights": "ab" * 32},
        ),
    )
