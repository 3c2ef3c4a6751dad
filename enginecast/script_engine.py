"""Engines made of a hybrid of script and trace, written and run: TorchScript, and ONNX from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from enginecast import __version__
from enginecast.capture.outputs import OutputSpec
from enginecast.capture.torchscript import DEPRECATION, Hybrid
from enginecast.describe import describe_inputs, describe_model, describe_text, dtype_name
from enginecast.errors import BundleError, EnginecastError, InputError, LoweringError
from enginecast.exporters.onnx import GRAPH_FILE, WEIGHTS_FILE, Lowered
from enginecast.exporters.torchscript import ENGINE_FILE, lower_script_to_onnx, write_torchscript
from enginecast.job import PENDING
from enginecast.plan import Plan
from enginecast.runtime.bundle import Bundle
from enginecast.runtime.load import opener_of
from enginecast.runtime.manifest import EngineRecord, Manifest, Output, Verdict
from enginecast.runtime.session import Engine
from enginecast.runtime.staging import Staging
from enginecast.scripted import ScriptModel, output_specs
from enginecast.steps import Steps
from enginecast.trial import unsealed
from enginecast.verify.engine import verify_engine, where_it_ran
from enginecast.verify.reference import Reference
from enginecast.verify.verdict import judge


@dataclass(frozen=True)
class Made:
    """An engine that was written and run."""

    target: str
    lowered: Lowered
    outputs: tuple[OutputSpec, ...]
    verdict: Verdict
    hybrid: Hybrid
    how: str
    """Made how, and why not otherwise, in words for the manifest."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Workshop:
    """What engines of one model are made of and compared with."""

    model: ScriptModel
    reference: Reference
    plan: Plan
    threads: int | None
    staging: Staging
    steps: Steps

    @property
    def example(self) -> dict[str, torch.Tensor]:
        """The inputs that are traced, on the engine's device."""
        return {name: t.to(self.plan.device) for name, t in self.model.example.items()}

    def torchscript(self, made: Hybrid, problems: tuple[str, ...]) -> Made:
        """Write the TorchScript engine and run it.

        Args:
            problems: reasons to reject it that were found before.
        """
        with torch.no_grad():
            given = made.module(*self.example.values())
        dtypes = {name: t.dtype for name, t in zip(made.outputs, given, strict=True)}
        outputs = output_specs(self.model, self.reference, dtypes)
        with self.steps("lower"):
            lowered = write_torchscript(made.module, self.staging.folder)
        verdict = self._try("torchscript", lowered, outputs, problems)
        notes = (*made.notes, f"{DEPRECATION}: a later torch may not load this engine")
        return Made("torchscript", lowered, outputs, verdict, made, "a TorchScript engine", notes)

    def or_onnx(self, engine: Made) -> Made:
        """The same as an ONNX engine when that agrees with eager, too; else `engine`, told of."""
        try:
            made = self._onnx(engine)
        except EnginecastError as error:
            reason = error.message
        else:
            if made.verdict.outcome != "rejected":
                (self.staging.folder / ENGINE_FILE).unlink()
                return made
            reason = " ".join(made.verdict.reasons[0].split())
        for name in (GRAPH_FILE, WEIGHTS_FILE):
            (self.staging.folder / name).unlink(missing_ok=True)
        self.steps.say(
            f"no ONNX engine ({reason}): this becomes a TorchScript engine, which needs torch, and"
            " --allow-code to run"
        )
        return replace(engine, how=f"{engine.how}; no ONNX engine: {reason}")

    def _onnx(self, engine: Made) -> Made:
        if self.plan.precision != "fp32":
            raise LoweringError(
                f"ONNX Runtime's CPU provider does not compute in {self.plan.precision}, and there"
                " is no program of torch.export to judge in its place"
            )
        with self.steps("lower to ONNX"):
            lowered = lower_script_to_onnx(
                engine.hybrid.module,
                self.staging.folder,
                example=self.example,
                outputs=engine.hybrid.outputs,
                input_dims={
                    spec.name: {i: d.name for i, d in enumerate(spec.dims) if d.name}
                    for spec in self.model.inputs
                },
                output_dims={
                    spec.name: {i: d for i, d in enumerate(spec.dims) if isinstance(d, str)}
                    for spec in engine.outputs
                },
            )
        verdict = self._try("onnxruntime", lowered, engine.outputs, ())
        way = "with torch's legacy ONNX exporter; running it needs neither"
        return replace(
            engine,
            target="onnxruntime",
            lowered=lowered,
            verdict=verdict,
            how="an ONNX engine, by torch's legacy exporter",
            notes=(*engine.hybrid.notes, f"{DEPRECATION}: this engine was made with it and {way}"),
        )

    def _try(
        self,
        target: str,
        lowered: Lowered,
        outputs: tuple[OutputSpec, ...],
        problems: Sequence[str],
    ) -> Verdict:
        """Run an engine over all cases and judge it."""
        manifest = self.manifest(target, lowered, outputs)
        files = unsealed(lowered.files)
        bundle = Bundle(self.staging.folder, msgspec.structs.replace(manifest, files=files))
        try:
            with self.steps("verify"):
                session = opener_of(target)(
                    bundle, manifest.engines[0], self.plan.providers, self.threads
                )
                with Engine(bundle, manifest.engines[0], session) as engine:
                    return verify_engine(engine, self.reference, problems=tuple(problems))
        except (BundleError, InputError) as error:
            # The engine is ours, and so is what is wrong with it: that is a rejection.
            reasons = (*problems, f"the engine does not run: {error.message}")
            where = where_it_ran("")
            return judge(
                None, self.reference.floor, where=where, engine_ran=False, problems=reasons
            )

    def manifest(self, target: str, lowered: Lowered, outputs: tuple[OutputSpec, ...]) -> Manifest:
        """The manifest of a bundle with one engine; `judged` and the rungs fill in the rest."""
        of_torch = target == "torchscript"
        plan = self.plan
        engine = EngineRecord(
            target=target,
            file=lowered.files[0],
            weights=WEIGHTS_FILE if WEIGHTS_FILE in lowered.files else None,
            precision=plan.precision,
            opset=None if of_torch else lowered.opset,
            domains=dict(lowered.domains),
            minimum_runtime=lowered.minimum_runtime,
            providers=(f"torch-{plan.device}",) if of_torch else plan.engine_providers,
            arch=plan.arch,
            verdict=PENDING,
        )
        source, inputs = self.model.source, self.model.inputs
        return Manifest(
            enginecast=__version__,
            model=describe_model(source),
            inputs=describe_inputs(inputs),
            symbols=self.model.symbols,
            outputs=tuple(
                Output(name=spec.name, dtype=dtype_name(spec.dtype), shape=spec.dims)  # type: ignore[arg-type]
                for spec in outputs
            ),
            outputs_chosen=bool(self.model.wanted),
            pipeline="",
            precision=plan.precision,
            text=describe_text(source, inputs),
            engines=(engine,),
        )
