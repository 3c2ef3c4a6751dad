"""The registry of passes, ours by name and third parties' by entry point, and pipelines of them.

Classes load when they are used: listing names does not import torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from enginecast.errors import SpecError
from enginecast.passes.ir.spec import Located, Presets, parse_located
from enginecast.passes.presets import preset
from enginecast.plugins import Broken, Registry

if TYPE_CHECKING:
    from enginecast.passes.ir.base import Pass

PASSES = {
    # Of a capture: `presets` has the order.
    "inline-autocast": "enginecast.passes.captured.inline_autocast:InlineAutocast",
    "keep-outputs": "enginecast.passes.captured.keep_outputs:KeepOutputs",
    "canonicalize-writes": "enginecast.passes.captured.canonicalize_writes:CanonicalizeWrites",
    "drop-idle-draws": "enginecast.passes.captured.drop_idle_draws:DropIdleDraws",
    "bind-weights": "enginecast.passes.captured.bind_weights:BindWeights",
    "functionalize": "enginecast.passes.captured.functionalize:Functionalize",
    "lift-constants": "enginecast.passes.captured.lift_constants:LiftConstants",
    "widen-halves": "enginecast.passes.captured.widen_halves:WidenHalves",
    # Of pipelines.
    "rescale-streams": "enginecast.passes.rescale_streams:RescaleStreams",
    "rescale-residual": "enginecast.passes.rescale_streams:RescaleResidual",
    "canonicalize": "enginecast.passes.canonicalize:Canonicalize",
    "unify-dtype": "enginecast.passes.unify_dtype:UnifyDtype",
    "exact-position-buckets": "enginecast.passes.exact_position_buckets:ExactPositionBuckets",
    "fold-batch-norm": "enginecast.passes.fold_batch_norm:FoldBatchNorm",
    "fuse-rms-norm": "enginecast.passes.fuse_rms_norm:FuseRmsNorm",
    "fuse-gelu": "enginecast.passes.fuse_gelu:FuseGelu",
    "fuse-attention": "enginecast.passes.fuse_attention:FuseAttention",
    "fuse-skip-norm": "enginecast.passes.fuse_skip_norm:FuseSkipNorm",
    "merge-linears": "enginecast.passes.merge_linears:MergeLinears",
    "smooth-outliers": "enginecast.passes.smooth_outliers:SmoothOutliers",
    "plan-fp8": "enginecast.passes.plan_fp8:PlanFp8",
    "plan-int8": "enginecast.passes.plan_int8:PlanInt8",
    "fp8-matmul": "enginecast.passes.fp8_matmul:Fp8Matmul",
    "int8-matmul": "enginecast.passes.int8_matmul:Int8Matmul",
    # Lowering passes, which end a target's pipeline.
    "drop-assertions": "enginecast.passes.lower.drop_assertions:DropAssertions",
    "decompose-fused": "enginecast.passes.lower.decompose_fused:DecomposeFused",
    "legalize-quantized": "enginecast.exporters.onnx.passes.legalize_quantized:LegalizeQuantized",
    "legalize-fourier": "enginecast.exporters.onnx.passes.legalize_fourier:LegalizeFourier",
    "transpose-images": "enginecast.exporters.onnx.passes.transpose_images:TransposeImages",
    "stagger-rows": "enginecast.exporters.onnx.passes.stagger_rows:StaggerRows",
    "legalize-onnx": "enginecast.exporters.onnx.passes.legalize_onnx:LegalizeOnnx",
    "keep-norms-whole": "enginecast.exporters.tensorrt.passes.keep_norms_whole:KeepNormsWhole",
    "append-cache": "enginecast.exporters.onnx.passes.append_cache:AppendCache",
    "lift-weights": "enginecast.passes.lower.lift_weights:LiftWeights",
    "merge-equal": "enginecast.passes.lower.merge_equal:MergeEqual",
    "separate-block-memory": (
        "enginecast.exporters.onnx.passes.separate_block_memory:SeparateBlockMemory"
    ),
    "hoist-weights": "enginecast.passes.lower.hoist_weights:HoistWeights",
    "dequantize-tables": "enginecast.exporters.tensorrt.passes.dequantize_tables:DequantizeTables",
    "decompose-quantized": "enginecast.passes.lower.decompose_quantized:DecomposeQuantized",
    "flatten-calls": "enginecast.passes.lower.flatten_calls:FlattenCalls",
}


REGISTRY = Registry("pass", "enginecast.passes", PASSES, SpecError)


def known_passes() -> dict[str, str]:
    """Name -> "module:Class" of every pass, ours first; imports none of them."""
    return REGISTRY.known()


def pass_class(name: str) -> type["Pass"]:
    """The class of a pass.

    Raises:
        SpecError: no pass has this name.
        DefectError: its class cannot be loaded or is not such a pass.
    """
    from enginecast.passes.ir.base import Pass  # here, so that listing names does not import torch

    return REGISTRY.load(name, Pass)  # type: ignore[type-abstract]


def all_passes() -> tuple[dict[str, type["Pass"]], tuple[Broken, ...]]:
    """Every pass by name, and the entry points that name no usable one; imports them all."""
    from enginecast.passes.ir.base import Pass

    return REGISTRY.sorted_out(Pass)  # type: ignore[type-abstract]


def require_passes(text: str) -> None:
    """Refuse a spec that is not in the grammar or names an unknown pass; imports none of them.

    Raises:
        SpecError: points at the place.
        DefectError: two packages claim the name of a pass.
    """
    for element in parse_located(text, preset):
        with _pointing_at(element):
            REGISTRY.require(element.spec.name)


def build(text: str, presets: Presets = preset) -> tuple["Pass", ...]:
    """Make the passes that a pipeline spec names, in order.  A pass may occur more than once.

    Args:
        text: the spec.
        presets: what `@fp16` and the like stand for; else the presets for ONNX Runtime on a CPU.

    Raises:
        SpecError: the text is not in the grammar, names an unknown pass or option, or has a pass
            before another that must come earlier.
        DefectError: a pass of another package cannot be loaded.
    """
    from enginecast.passes.ir.options import pass_from_spec  # here: it imports torch

    elements = parse_located(text, presets)
    passes = tuple(pass_from_spec(_class_of(element), element) for element in elements)
    for index, pass_ in enumerate(passes):
        earlier = {other.name for other in passes[:index]}
        later = {other.name for other in passes[index + 1 :]}
        late = sorted((pass_.after & later) - earlier)
        if late:
            raise elements[index].place.error(
                f"pass '{pass_.name}' must come after '{late[0]}'",
                hint=f"Move '{late[0]}' before '{pass_.name}'.",
            )
    return passes


def _class_of(element: Located) -> type["Pass"]:
    with _pointing_at(element):
        return pass_class(element.spec.name)


@contextmanager
def _pointing_at(element: Located) -> Iterator[None]:
    try:
        yield
    except SpecError as error:
        raise element.place.error(error.message, hint=error.hint) from error
