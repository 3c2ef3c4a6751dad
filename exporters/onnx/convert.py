"""Convert a program with torch.onnx, quietly; say in the user's terms what it cannot convert."""

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import LoweringError, first_line
from enginecast.exporters import files
from enginecast.exporters.onnx.decompose import decompose
from enginecast.exporters.onnx.ops.registry import (
    ANOTHER_OP,
    Reader,
    refuse_calls,
    translation_table,
)
from enginecast.library_names import aten
from enginecast.passes.ir.blocks import all_nodes, is_structured
from enginecast.passes.ir.edit import structural_copy, value
from enginecast.passes.ir.effects import WITHOUT_NOISE
from enginecast.passes.ir.recurrences import whole_recurrences
from enginecast.passes.ir.source import call_place

HALVES = (torch.float16, torch.bfloat16)
_LOGGERS = ("torch.onnx", "torch.onnx._internal.exporter", "onnx_ir", "onnxscript")
_NODE = re.compile(r"Error when translating node %(?P<name>\w+)")
_OP = re.compile(r"No ONNX function found for <OpOverload\(op='\w+\.(?P<name>\w+)'")
_NO_FUNCTION = "No ONNX function found for"
_ATTENTION = "aten::scaled_dot_product_attention"
"""Draws where its fifth argument, dropout, is not 0."""
_CONVERSIONS = frozenset({aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other})
"""What a trace writes as `_to_copy`."""
_DRAWS = re.compile(
    r"aten::(rand|randn|randint|randperm|bernoulli|multinomial|normal|uniform|exponential|random)"
    r"(_like|_)?"
)
"""Ops that draw random numbers.  Those of ONNX have no kernels in ONNX Runtime (1.31) since opset
22, and would draw other numbers than torch."""


def convert(program: ExportedProgram, *, opset: int, reader: Reader) -> ir.Model:
    """Convert a program after the passes of `lower.lowering`, whose weights may be without data.

    Raises:
        LoweringError: an op has no ONNX form, or draws random numbers; names it with module and
            source line.
    """
    _refuse_noise(program)
    refuse_calls(program)
    try:
        if len(_fake_modes(program)) == 1:  # of what passes traced are others; torch wants one
            try:
                return _convert(_AsItIs.of(program), opset, reader)
            except torch.onnx.errors.OnnxExporterError as error:
                if any(isinstance(cause, LoweringError) for cause in _causes(error)):
                    raise  # a translation refuses the op: another trace has it as well
        return _convert(program, opset, reader)
    except torch.onnx.errors.OnnxExporterError as error:
        raise LoweringError(
            _explain(error, program),
            hint=ANOTHER_OP,
        ) from error


def _fake_modes(program: ExportedProgram) -> set[FakeTensorMode]:
    values = (value(node) for node in all_nodes(program))
    return {found.fake_mode for found in values if isinstance(found, FakeTensor)}


class _AsItIs(ExportedProgram):
    """A program that torch.onnx does not trace again where that would come to the same: it takes
    longer than all the rest of a conversion.
    """

    @classmethod
    def of(cls, program: ExportedProgram) -> "_AsItIs":
        """A copy that shares the weights, for torch.onnx writes into what it does not trace."""
        copy = structural_copy(program)
        for node in copy.graph.nodes:
            if node.op == "call_function":
                _rewrite(node)
        copy.__class__ = cls
        assert isinstance(copy, cls)
        return copy

    def run_decompositions(
        self, decomp_table: Mapping[Any, Any] | None = None, **options: Any
    ) -> ExportedProgram:
        """The program, each op decomposed that can be alone; else what torch makes of it."""
        if decomp_table is None or not decompose(self, decomp_table):
            traced: ExportedProgram = super().run_decompositions(decomp_table, **options)
            return traced
        return self


def _rewrite(node: Node) -> None:
    """Write a view or a conversion as a trace would."""
    if node.target in _CONVERSIONS:
        node.target = aten._to_copy.default
        node.args, node.kwargs = node.args[:1], {"dtype": value(node).dtype}
    elif node.target is aten.flatten.using_ints:
        sizes = [-1 if isinstance(size, torch.SymInt) else size for size in value(node).shape]
        if sizes.count(-1) <= 1:
            node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], sizes), {}


def _convert(program: ExportedProgram, opset: int, reader: Reader) -> ir.Model:
    with quiet(), torch.no_grad(), whole_recurrences():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            custom_translation_table=translation_table(reader),
            optimize=False,
            verbose=False,
        )
    assert converted is not None
    _cast_outputs(converted.model, program)
    return converted.model


def _cast_outputs(model: ir.Model, program: ExportedProgram) -> None:
    """Round outputs to the 16 bits that the program says, in place.

    torch.onnx reduces 16-bit values in fp32.  It rounds the result for all that reads it, and
    returns it as it was.
    """
    [returned] = program.graph.output_node().args
    outputs = model.graph.outputs
    for place, (output, node) in enumerate(zip(outputs, returned, strict=False)):
        wanted = getattr(value(node), "dtype", None) if isinstance(node, Node) else None
        if wanted not in HALVES or output.dtype != ir.DataType.FLOAT:
            continue
        dtype = from_torch_dtype(wanted)
        cast = ir.node("Cast", [output], {"to": int(dtype)})
        [rounded] = cast.outputs
        rounded.dtype, rounded.shape = dtype, output.shape
        model.graph.append(cast)
        outputs[place] = rounded


def _refuse_noise(program: ExportedProgram) -> None:
    read: set[Node] = set()  # torch.fx takes no draw for dead
    for node in reversed(list(all_nodes(program))):
        if node.op != "output" and not is_structured(node) and node not in read:
            continue
        read.update(node.all_input_nodes)
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target.overloadpacket._qualified_op_name
        if _DRAWS.fullmatch(name) or (name == _ATTENTION and len(node.args) > 4 and node.args[4]):
            raise LoweringError(
                f"ONNX Runtime draws no random numbers for {call_place(node)}",
                hint=WITHOUT_NOISE,
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.onnx prints progress, and warns of torchvision ops it cannot register; onnx_ir warns of
    weights that are outputs.
    """
    with files.quiet(*_LOGGERS), contextlib.redirect_stdout(io.StringIO()):
        yield


def _explain(error: BaseException, program: ExportedProgram) -> str:
    """The op and its place in the user's code, and the innermost cause where it says more."""
    errors = _causes(error)
    said = (_NODE.search(str(e)) or _OP.search(str(e)) for e in errors)
    named = next(filter(None, said), None)
    node = None if named is None else _find(program, named["name"])
    text = first_line(errors[-1])
    if node is None:
        return f"torch.onnx cannot convert this program: {text}"
    if text.startswith(_NO_FUNCTION):
        return f"ONNX has no form for {call_place(node)}"
    return f"the conversion of {call_place(node)} to ONNX failed: {text}"


def _causes(error: BaseException) -> list[BaseException]:
    """The error, and what led to it, the first cause last."""
    errors = [error]
    while (cause := errors[-1].__cause__) is not None:
        errors.append(cause)
    return errors


def _find(program: ExportedProgram, name: str) -> Node | None:
    """The node that torch.onnx names: one of the program or of its decomposition, or else the one
    whose op is called like it (torch.onnx decomposes further: special_bessel_j0 to bessel_j0).
    """
    calls = [node for node in all_nodes(program) if node.op == "call_function"]
    with contextlib.suppress(Exception):  # what torch.onnx did not manage may fail here as well
        calls += [n for n in all_nodes(program.run_decompositions()) if n.op == "call_function"]
    op = name.rstrip("_0123456789")
    same_name = (node for node in calls if node.name == name)
    same_op = (node for node in calls if op in str(node.target))
    return next(chain(same_name, same_op), None)
