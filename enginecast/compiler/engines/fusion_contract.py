"""The fusion contract: how many fusion sites a model should have, and how many remain fused at each
stage.

A fusion that silently stops matching raises no error and costs speed. So the sites are counted in
the captured program by what they compute, before any pass, and again after each stage.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.analyses.attention import is_attention_core
from enginecast.passes.analyses.norms import is_statistic
from enginecast.passes.analyses.residual_stream import RANKS
from enginecast.passes.ir.base import Site
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import (
    aten,
    erase_dead,
    first_input,
    same_shape,
    shape_of,
    structural_copy,
)
from enginecast.passes.ir.match import behind_casts, is_call
from enginecast.passes.ir.source import module_path, source_line
from enginecast.runtime.bundle.manifest import Fusion

RMS_NORM, SKIP_NORM, ATTENTION = "rms-norm", "residual+norm", "attention"

# Those of ONNX Runtime, and what Inductor makes one kernel of (see `aotinductor.op_counts`).
_SKIP_OPS = frozenset({"SkipSimplifiedLayerNormalization", "add+rms_norm"})
_NORM_OPS = frozenset({"RMSNormalization", "SimplifiedLayerNormalization", "rms_norm"}) | _SKIP_OPS
_ATTENTION_OPS = frozenset(
    {"Attention", "MultiHeadAttention", "GroupQueryAttention", "scaled_dot_product_attention"}
)
_OPS = {RMS_NORM: _NORM_OPS, SKIP_NORM: _SKIP_OPS, ATTENTION: _ATTENTION_OPS}
_PASSES = {RMS_NORM: "fuse-rms-norm", SKIP_NORM: "fuse-skip-norm", ATTENTION: "fuse-attention"}


def expect_fusions(
    captured: ExportedProgram, *, skip_norms: bool = True
) -> dict[str, tuple[str, ...]]:
    """The sites of a captured program by kind, each as "module file:line"; of what is computed, and
    nothing reads, there are none.

    Args:
        skip_norms: whether the engine has an op for a residual sum and its norm.
    """
    live = structural_copy(captured)
    erase_dead(live.graph)
    norms = [n for n in all_nodes(live) if is_statistic(n) or is_call(n, aten.rms_norm.default)]
    cores = [node for node in all_nodes(live) if is_attention_core(node)]
    skips = [node for node in norms if skip_norms and _reads_residual_sum(node)]
    return {
        RMS_NORM: tuple(map(_place, norms)),
        SKIP_NORM: tuple(map(_place, skips)),
        ATTENTION: tuple(map(_place, cores)),
    }


def count_fusions(
    expected: Mapping[str, tuple[str, ...]],
    program: ExportedProgram,
    engine_ops: Mapping[str, int],
    runtime_ops: Iterable[str] | None,
    sites: Mapping[str, Sequence[Site]],
) -> tuple[Fusion, ...]:
    """Compare the expected fusions with those found.

    Args:
        program: after the passes.
        engine_ops: op counts of the engine's graph, names as "domain::Op". For torch's own ops,
            these are the ops of the last lowered program and count as the program's.
        runtime_ops: op types as the runtime executed them; None if it was not run.
    """
    ops = torch.ops.enginecast
    fused = {
        RMS_NORM: (aten.rms_norm.default, ops.skip_rms_norm.default),
        SKIP_NORM: (ops.skip_rms_norm.default,),
        ATTENTION: (ops.attention.default,),
    }
    executed = None if runtime_ops is None else list(runtime_ops)
    of_torch = any(op.startswith("aten::") for op in engine_ops)
    found = []
    for kind, places in expected.items():
        nodes = (
            [node for node in all_nodes(program) if is_call(node, *fused[kind])] if places else []
        )
        in_engine = sum(n for op, n in engine_ops.items() if op.split("::")[-1] in _OPS[kind])
        in_program = in_engine if of_torch else len(nodes)
        in_runtime = None if executed is None else sum(op in _OPS[kind] for op in executed)
        missing: list[str] = []
        if in_program < len(places):
            missing += _left_alone(kind, places, sites)
        if in_engine < in_program:
            missing.append(f"lowering kept {in_engine} of {in_program}")
        # Of blocks, the case that is counted on runs some, and some of them many times.
        in_blocks = any(node.graph is not program.graph for node in nodes)
        if in_runtime is not None and in_runtime < in_engine and not in_blocks:
            missing.append(f"the runtime executes {in_runtime} of {in_engine}")
        found.append(
            Fusion(
                kind=kind,
                expected=len(places),
                program=in_program,
                engine=in_engine,
                runtime=in_runtime,
                missing=tuple(missing),
            )
        )
    return tuple(fusion for fusion in found if fusion.expected or fusion.program)


def _left_alone(
    kind: str, places: Sequence[str], sites: Mapping[str, Sequence[Site]]
) -> Sequence[str]:
    """The passes' reasons for the sites that they left alone."""
    found = [site for site in sites.get(_PASSES[kind], ()) if site.reason]
    if kind == SKIP_NORM:
        # A norm that is not fused itself never gets as far as the residual.
        norms = sites.get(_PASSES[RMS_NORM], ())
        found += [s for s in norms if s.reason and _named(s) in places]
    if found:
        return [f"{_named(site)}: {site.reason}" for site in found]
    if _PASSES[kind] not in sites:
        return [f"{_PASSES[kind]} is not in the pipeline"]
    return [f"{_PASSES[kind]} did not see the site"]


def _named(site: Site) -> str:
    return f"{site.module} {site.source}".strip()


def _reads_residual_sum(norm: Node) -> bool:
    source = first_input(norm)
    if is_statistic(norm):
        source = first_input(source)
    source = behind_casts(source)
    if not is_call(source, aten.add.Tensor) or len(shape_of(source)) not in RANKS:
        return False
    shape = shape_of(source)
    addends = source.args[:2]
    return all(isinstance(a, Node) and same_shape(shape_of(a), shape) for a in addends)


def _place(node: Node) -> str:
    return f"{module_path(node)} {source_line(node)}".strip()
