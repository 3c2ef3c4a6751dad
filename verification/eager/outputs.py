"""Run eager, or the captured program in fp64, and name the outputs.

Memory stays small: one eager module exists at a time, and the fp64 reference is the captured
program interpreted with its weights raised to fp64 one by one, right before they are used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from enginecast.errors import EnginecastError, VerificationError
from enginecast.installation import missing_requirement
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.interpret import AssertionFailedError
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.text import DTYPES
from enginecast.passes.registry import build
from enginecast.progress import counted
from enginecast.runtime.values.arrays import to_array
from enginecast.verification.metrics import Array, Outputs
from enginecast.verification.runs import Runs

Eager = Callable[[torch.dtype], nn.Module]
"""Makes the eager module in a dtype."""
Forward = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Runs a module on a case's inputs and names its outputs."""
FP32_ALONE = "Where an op has no kernel in {}, say .float() before it, or use --precision fp32."
FP32_FIRST = (
    "It computes in 16 bits by itself: give it in fp32 (a .pt2 program is exported from"
    " model.float()), and choose the engine's precision with --precision."
)
NARROW = "Where the model does not take such sizes, narrow them: --dynamic NAME:DIM=MIN..MAX."


class MixedDtypesError(VerificationError):
    """Eager has an op that reads tensors of several dtypes."""


class Case(Protocol):
    """Named inputs."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class NamedInputs:
    """A case that is not the user's: with other padding, one of its rows, or rounded."""

    name: str
    inputs: Mapping[str, Tensor]


def as_array(tensor: Tensor) -> Array:
    """A tensor as a numpy array, bfloat16 included."""
    return to_array(tensor.detach().cpu().contiguous())


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Each tensor as a numpy array."""
    return {name: as_array(tensor) for name, tensor in tensors.items()}


def mask_of(case: Case, mask_input: str | None) -> Tensor | None:
    """The attention mask of a case, [B, S]."""
    return None if mask_input is None else case.inputs[mask_input]


def reference_program(program: ExportedProgram) -> ExportedProgram:
    """A copy of the program that computes in fp64; it shares the weights."""
    copy = structural_copy(program)
    run_pipeline(build("unify-dtype{to=fp64}"), copy, PassContext())
    return copy


def reference_outputs(exact: Runs, cases: Sequence[Case]) -> Outputs:
    """The fp64 outputs of every case, computed by the `reference_program` of the captured program.

    Raises:
        AssertionFailedError: an assertion of the program does not hold in a case.
        VerificationError: the program does not run in a case.
    """
    inputs = [case.inputs for case in cases]
    try:
        outputs = exact.outputs(inputs)
    except AssertionFailedError as error:
        message = f"case {cases[error.case].name!r}: {error.message}"
        raise AssertionFailedError(message, error.case, hint=error.hint) from error
    except EnginecastError:
        raise
    except (IndexError, RuntimeError, ValueError) as error:  # an operator's, as eager would get it
        raise VerificationError(
            f"the captured program does not run in all its sizes: {str(error).splitlines()[0]}",
            hint=NARROW,
        ) from error
    return {case.name: as_arrays(found) for case, found in zip(cases, outputs, strict=True)}


def eager_outputs(eager: Eager, cases: Sequence[Case], *, dtype: str, forward: Forward) -> Outputs:
    """Run the eager module in one dtype over all cases.

    Args:
        dtype: "fp32", "fp16" or "bf16"; float inputs are cast to it.

    Raises:
        VerificationError: eager cannot run in this dtype.
    """
    module = eager(DTYPES[dtype])
    found = {}
    for case in counted(cases, "cases"):
        # Copies: a forward may write into what it is given.
        inputs = {
            name: tensor.to(DTYPES[dtype] if tensor.is_floating_point() else None, copy=True)
            for name, tensor in case.inputs.items()
        }
        try:
            with torch.no_grad():
                found[case.name] = as_arrays(forward(module, inputs))
        except EnginecastError:
            raise
        except Exception as error:  # the model's own code, which may not take every size
            if missing := missing_requirement(error, "the model's forward"):
                raise missing from error
            sizes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
            of_dtypes = any(word in str(error) for word in ("dtype", "Half", "BFloat16"))
            hint = FP32_FIRST if of_dtypes else NARROW
            is_mixed = of_dtypes and "not implemented" not in str(error)
            raise (MixedDtypesError if is_mixed else VerificationError)(
                f"case {case.name!r} ({sizes}): eager {dtype} cannot run here: {error}",
                hint="Without eager there is no floor to judge an engine by. "
                + (FP32_ALONE.format(dtype) if dtype in ("fp16", "bf16") else hint),
            ) from error
    return found


def autocast_outputs(
    eager: Eager, cases: Sequence[Case], *, dtype: str, forward: Forward
) -> Outputs:
    """Run the eager module under `torch.autocast` in a 16-bit dtype, with weights and inputs in
    fp32: as code is trained and run that casts by itself.

    Raises:
        VerificationError: it does not run so, either.
    """

    def cast(module: nn.Module, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with torch.autocast("cpu", dtype=DTYPES[dtype]):
            return forward(module, inputs)

    return eager_outputs(eager, cases, dtype="fp32", forward=cast)


class _Widening(TorchDispatchMode):
    """Function mode that gives fp64 to every operator that asks for fp32.

    `module.double()` is not enough: forward may say `.float()` or `dtype=torch.float32`, as norms
    and rotary embeddings do.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@contextmanager
def in_fp64() -> Iterator[None]:
    """Within the block, compute in fp64 even where the code asks for fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def fp64_outputs(
    eager: Eager, cases: Sequence[Case], forward: Forward
) -> tuple[Outputs, str | None]:
    """The model's outputs in fp64, or in fp32 if it does not run in fp64.

    The latter is a stricter measure: eager fp32 has no error by it, and an engine may have three
    unit roundoffs.

    Returns:
        The outputs, and a note on why they are fp32; None when they are fp64.
    """

    def widened(dtype: torch.dtype) -> nn.Module:
        # Some keep buffers in fp32.  Complex ones would lose their imaginary part by `Module.to`.
        module: nn.Module = eager(dtype)
        module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return module

    def forward_fp64(module: nn.Module, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with in_fp64():
            return forward(module, inputs)

    try:
        return eager_outputs(widened, cases, dtype="fp64", forward=forward_fp64), None
    except VerificationError as error:
        plain = eager_outputs(eager, cases, dtype="fp32", forward=forward)
        return (
            plain,
            f"the reference is eager fp32: the model does not run in fp64: {error.message}",
        )
