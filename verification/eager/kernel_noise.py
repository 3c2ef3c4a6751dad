"""Estimate the error of kernels other than eager's: run the program with noise in every value.

Eager is one sample of fp32's rounding error, and sometimes a lucky one. A backend sums in another
order and has its own exp. So every value that an op rounds gets noise of the measured error of ONNX
Runtime's kernels (1.28, CPU provider, against fp64, in unit roundoffs):

    products        0.3 sqrt(K), 5.1 at most, of sqrt(x^2 @ w^2)    (K=16: 1.2, 64: 2.4, 256: 5.1)
    conv1d          the same, 9.3 at most (1.31)                    (K=672: 7.5, 1536: 8, 3072: 9.2)
    sums, norms     1 + 0.12 sqrt(K) of the result or sqrt(sum x^2) (K=16: 1, 256: 1.4)
    softmax         5 of the result                                 (K=16: 4, 256: 5.4, 4096: 8.2)
    layer norm      1.5 of the result, 0.2 at least                 (0.8 to 1.2)
    attention       3 of the mean result of a channel               (2.0)
    what else adds  as sums, of what the result moves by where each input is off by a roundoff
    erf, tanh, ...  1.3 of the result                               (0.4 to 1.3)

The error of a long sum is not left to chance: it follows from the order. torch adds in pairs, most
kernels one number after another, and where numbers are equal, as on a blank image or behind a ReLU,
each step is off in the same direction. So `ordered_outputs` computes sums, and what consists of
them, in the order of such kernels (`sequence`). It is ONNX Runtime's to within 1% (of 9216
equal values: off by 154 or 272 unit roundoffs, by kernel; torch: 3). Noise counts 16 terms.

Equal values get equal noise, since a kernel rounds equal computations alike: on an image of one
color, or in a batch of equal rows, a mean over positions does not average it out.

Ops that every kernel rounds alike (x + y, x * y) get none, nor do ops that move, select or compare,
nor integers and halves. Decisions inside the program, such as an index or a comparison, are made as
without noise: a flip is not a rounding error.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from enginecast.library_names import aten
from enginecast.passes.ir.interpret import Run, named
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.traits import Trait, has
from enginecast.verification.eager.sequence import LANES, in_sequence

SAMPLES = 2
"""Number of noisy runs of each case in a round."""
ROUNDED_SAMPLES = 8
"""The same in 16 bits, where few rows of attention turn on one rounding, each in some runs."""
WORK = 3e9
"""Elements of a case's inputs times parameters, summed over the cases that are run."""
EDGE_WORK = 1e11
"""The same for edge cases, in which eager may be one sample for all rows."""
PRODUCTS, PRODUCTS_MOST = 0.3, 5.1
CONV1D_MOST = 9.3
SUMS = 0.12
SOFTMAX = 5.0
NORM, NORM_LEAST = 1.5, 0.2
ATTENTION = 3.0
OTHER = 1.3
UNIT = 2.0**-24
ORDERED = 16
"""Longest sum whose error is noise alone; that of a longer one depends on its order."""
MOST_TERMS = 256
"""Assumed number of terms of a sum if an op does not tell how many it adds."""
DYADIC = 256.0
"""Multiples of 1 / DYADIC are assumed exact."""


def _ops(*rows: str) -> frozenset[Any]:
    """The default overloads of ops, or the named ones."""
    names = [name if "." in name else f"{name}.default" for row in rows for name in row.split()]
    return frozenset(attrgetter(name)(aten) for name in names)


_PRODUCTS = _ops("linear mm bmm matmul addmm baddbmm conv1d conv2d conv3d convolution")
_CONV1D = _ops("conv1d conv1d.padding")
_SUMS = _ops("sum sum.dim_IntList cumsum")
_SOFTMAX = _ops("softmax.int _softmax log_softmax.int")
_NORMS = _ops("layer_norm group_norm instance_norm rms_norm batch_norm")
_STEPS = _ops(
    "floor ceil round round.decimals trunc sign floor_divide div.Tensor_mode",
    "remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar",
)
_MEASURED = _PRODUCTS | _SUMS | _SOFTMAX | _NORMS | {aten.scaled_dot_product_attention.default}
_SEVERAL = _ops(
    "var_mean var_mean.correction var_mean.dim std_mean std_mean.correction std_mean.dim",
    "lstm.input gru.input rnn_tanh.input rnn_relu.input",
)
"""Ops with several results."""
_ADDING = _ops(
    "vdot inner tensordot trace addr addcmul addcdiv lerp.Scalar lerp.Tensor linalg_cross cross",
    "chain_matmul linalg_multi_dot cdist pairwise_distance cosine_similarity cov nansum nanmean",
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec scatter_add index_add",
    "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn",
    "fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn",
    "stft stft.center istft mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy_loss nll_loss",
    "soft_margin_loss poisson_nll_loss binary_cross_entropy binary_cross_entropy_with_logits",
    "nll_loss_nd nll_loss2d kl_div",
)
"""Ops that sum without having the trait: a result may be small relative to its terms."""
_STAYS = (
    Trait.CORRECTLY_ROUNDED,
    Trait.EXACT,
    Trait.CASTS,
    Trait.METADATA,
    Trait.CREATES,
    Trait.CHECKS,
)


def affordable(
    cases: Sequence[Mapping[str, Tensor]], parameters: int, work: float = WORK
) -> list[int]:
    """The cases that can be run with noise, smallest first."""
    sizes = [sum(tensor.numel() for tensor in case.values()) for case in cases]
    kept, used = [], 0.0
    for index in sorted(range(len(cases)), key=sizes.__getitem__):
        used += float(sizes[index]) * max(parameters, 1)
        if used <= work:
            kept.append(index)
    return sorted(kept)


Inputs = Sequence[Mapping[str, Tensor]]


def noisy_outputs(
    program: ExportedProgram, inputs: Inputs, names: Sequence[str], seed: int = 0
) -> list[list[dict[str, Tensor]]]:
    """The outputs of each case for each noise sample, of a program in fp32."""
    return Noisy(program, inputs, SAMPLES, seed).outputs(names)


def ordered_outputs(
    program: ExportedProgram, inputs: Inputs, names: Sequence[str]
) -> list[list[dict[str, Tensor]]]:
    """The outputs of each case for each order of sums (`LANES`), of a program in fp32."""
    return Ordered(program, inputs, len(LANES)).outputs(names)


def rounded_outputs(
    program: ExportedProgram, inputs: Inputs, names: Sequence[str]
) -> list[list[dict[str, Tensor]]]:
    """The outputs of each case for each noise sample, of a program in fp16 or bf16."""
    return Rounded(program, inputs, ROUNDED_SAMPLES).outputs(names)


class Samples(Run):
    """Runs each case several times: first as it is, then with the errors of other kernels."""

    def __init__(
        self, program: ExportedProgram, cases: Inputs, samples: int, seed: int = 0
    ) -> None:
        self.runs = samples + 1
        self.generator = torch.Generator().manual_seed(seed)
        super().__init__(program, [case for case in cases for _ in range(self.runs)])

    def outputs(self, names: Sequence[str]) -> list[list[dict[str, Tensor]]]:
        """Of each sample, the outputs of each case."""
        with torch.no_grad():
            outputs = [named(results, names) for results in self.results()]
        return [outputs[sample :: self.runs] for sample in range(1, self.runs)]

    def evaluate(self, node: Node, case: int) -> Any:
        found = super().evaluate(node, case)
        sample = case % self.runs
        is_outer = node.graph is self._program.graph and node not in self._weights
        if not sample or not is_outer or node.op != "call_function":
            return found
        if isinstance(found, Tensor):
            if has(node, Trait.WRITES):
                return found
            if has(node, Trait.ALIASES) and not has(node, Trait.HEAVY):  # einsum may alias
                return found
            if not found.is_floating_point() or node.target in _STEPS:
                # A small change of what it reads may change it by much.
                return self.plain(node, case) if _is_read(node) else found
        elif node.target not in _SEVERAL:
            return found
        return self.sampled(node, found, sample)

    def plain(self, node: Node, case: int) -> Any:
        """The value of a node as it is, for a case that is a sample; else None."""
        sample = case % self.runs
        return self._own[case - sample].get(node) if sample else None

    def sampled(self, node: Node, found: Any, sample: int) -> Any:
        """A sample of the result of an op, which is `found` by torch's kernel."""
        raise NotImplementedError


class Ordered(Samples):
    """Sums in other orders."""

    def sampled(self, node: Node, found: Any, sample: int) -> Any:
        if not (node.target in _SUMS | _NORMS | _ADDING | _SEVERAL or has(node, Trait.REDUCES)):
            return found
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        with in_sequence(LANES[sample - 1]):
            return _called(node, args, kwargs)


class Rounded(Samples):
    """Rounds every value in 16 bits to it or to a neighbor, as another kernel may."""

    def sampled(self, node: Node, found: Any, sample: int) -> Any:
        is_half = isinstance(found, Tensor) and found.dtype in (torch.float16, torch.bfloat16)
        if not is_half or has(node, *_STAYS):
            return found
        noise = torch.rand(found.shape, generator=self.generator).sub_(0.5)
        noise.mul_(2 * torch.finfo(found.dtype).eps)
        return torch.where(found.isfinite(), (found * (1 + noise)).to(found.dtype), found)


class Noisy(Samples):
    """Noise in every value."""

    def sampled(self, node: Node, found: Any, sample: int) -> Any:
        if not isinstance(found, Tensor):
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            return pytree.tree_map(torch.add, tuple(found), tuple(self._moved(node, args, kwargs)))
        if found.dtype not in (torch.float32, torch.complex64) or has(node, *_STAYS):
            return found
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if found.is_complex():
            return found + self._moved(node, args, kwargs) if _adds(node) else found
        noise = self._drawn(found).sub_(0.5).mul_(math.sqrt(12.0))
        noise = (noise * _size(node, found, args, kwargs) * UNIT).nan_to_num(0.0, 0.0, 0.0)
        exact = (found * DYADIC).frac() == 0
        if _adds(node):
            noise += self._moved(node, args, kwargs)
        return torch.where(exact | ~found.isfinite(), found, found + noise)

    def _drawn(self, values: Tensor) -> Tensor:
        """A pseudo-random number from 0 to 1 for each value; equal values get equal numbers."""
        seed = torch.randint(2**31, (), generator=self.generator, dtype=torch.int32)
        return _hashed(values.contiguous().view(torch.int32) ^ seed)

    def _moved(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The change of a result if each input has the error of a summation."""

        def off(value: Any) -> Any:
            if _is_complex(value):
                return torch.view_as_complex(off(torch.view_as_real(value.resolve_conj())))
            if not _is_float(value):
                return value
            noise = self._drawn(value.float()).double()
            return value * (1 + (noise - 0.5) * math.sqrt(12.0) * UNIT)

        given = pytree.tree_map(_wide, args)
        op = partial(_called, node, kwargs=kwargs)
        most = max(each.numel() for each in pytree.tree_leaves(args) if isinstance(each, Tensor))
        factor = 1 + SUMS * math.sqrt(min(most, MOST_TERMS))
        moved = pytree.tree_map(torch.sub, op(pytree.tree_map(off, given)), op(given))
        return pytree.tree_map(lambda by: _narrow((by * factor).nan_to_num(0.0, 0.0, 0.0)), moved)


def _hashed(bits: Tensor) -> Tensor:
    """Integers as numbers from 0 to 1 that look random: the last step of MurmurHash3.

    Args:
        bits: int32; they are overwritten.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        # int32 has no shift that fills up with zeros.
        high = bits.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
        bits.bitwise_xor_(high).mul_(factor - ((factor >> 31) << 32))
    return bits.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _adds(node: Node) -> bool:
    if node.target in _MEASURED:
        return False
    return node.target in _ADDING or has(node, Trait.REDUCES, Trait.ACCUMULATES, Trait.HEAVY)


def _is_read(node: Node) -> bool:
    """Whether a node is read by anything but outputs and data movement."""
    return any(
        user.op != "output" and not (has(user, Trait.MOVES) and not _is_read(user))
        for user in node.users
    )


def _size(node: Node, found: Tensor, args: Any, kwargs: Any) -> Tensor:
    """The root mean square error of a value, in unit roundoffs."""
    size = found.abs()
    if node.target in _PRODUCTS:
        squared = [a.square() if _is_float(a) else a for a in args]
        length = math.sqrt(_terms(node, args))
        most = CONV1D_MOST if node.target in _CONV1D else PRODUCTS_MOST
        least = min(PRODUCTS * length, most)
        return torch.sqrt(_called(node, squared, kwargs)).mul_(least).maximum(size)
    if node.target in _SUMS:
        spread = torch.sqrt(_called(node, [args[0].square(), *args[1:]], kwargs))
        return spread.maximum(size) * _of_sums(args[0], found)
    if node.target in _SOFTMAX:
        return size * SOFTMAX
    if node.target in _NORMS:
        return size.clamp_(min=NORM_LEAST) * NORM
    if has(node, Trait.REDUCES, Trait.ACCUMULATES):
        return size * _of_sums(args[0], found)
    if node.target is aten.scaled_dot_product_attention.default:
        return size.square().mean(-2, keepdim=True).sqrt() * ATTENTION + size
    return size * OTHER


def _called(node: Node, args: Sequence[Any], kwargs: Any) -> Any:
    """The result of a node's op for other arguments."""
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _wide(value: Any) -> Any:
    if _is_complex(value):
        return value.to(torch.complex128)
    return value.double() if _is_float(value) else value


def _narrow(value: Tensor) -> Tensor:
    return value.to(torch.complex64) if value.is_complex() else value.float()


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_complex(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _terms(node: Node, args: Any) -> int:
    """Number of products that are summed for each element."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.ndim > 1]
    if not tensors:
        return 1
    is_moved = "conv" in str(node.target) or node.target is aten.linear.default
    weight = tensors[-1]
    return weight[0].numel() if is_moved else tensors[0].shape[-1]


def _of_sums(source: Any, found: Tensor) -> float:
    terms = source.numel() / max(found.numel(), 1) if isinstance(source, Tensor) else 1.0
    if isinstance(source, Tensor) and source.shape == found.shape and source.ndim:  # cumsum
        terms = max(source.shape)
    return 1 + SUMS * math.sqrt(min(terms, ORDERED))


def place_of_loss(program: ExportedProgram, inputs: Mapping[str, Tensor], position: int) -> str:
    """Where most of the error of an output arises in a case, as "mean at net.py:12 (head)".

    Kernel noise, or another order of sums, moves each value by some share of its length. From the
    output, the search follows the input that is moved by most, and names the op whose result is
    moved by so much more than its inputs.

    Args:
        position: which of the program's outputs.
    """
    moved: dict[Node, float] = {}
    for kind in (
        _NoisyMoves(program, [inputs], 2, 0),
        _OrderedMoves(program, [inputs], len(LANES)),
    ):
        with torch.no_grad():
            kind.results()
        for node, by in kind.moved.items():
            moved[node] = max(by, moved.get(node, 0.0))
    specs = program.graph_signature.output_specs
    names = [spec.arg.name for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    at: Node | None = next((n for n in program.graph.nodes if n.name == names[position]), None)
    worst, gain = None, 0.0
    while at is not None and at in moved:
        read = at.all_input_nodes
        before = max(read, key=lambda each: moved.get(each, 0.0)) if read else None
        rise = moved[at] - (moved.get(before, 0.0) if before is not None else 0.0)
        if rise > gain:
            worst, gain = at, rise
        at = before
    return "" if worst is None else _described(worst)


def _described(node: Node) -> str:
    name = getattr(node.target, "_schema", None)
    op = str(node.target) if name is None else name.name.split("::")[-1]
    line, module = source_line(node), module_path(node)
    return op + (f" at {line}" if line else "") + (f" ({module})" if module else "")


class _Moves(Samples):
    """Keeps by which share of its length a sample moves each value."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.moved: dict[Node, float] = {}

    def evaluate(self, node: Node, case: int) -> Any:
        found = super().evaluate(node, case)
        plain = self.plain(node, case)
        if plain is None or not isinstance(found, Tensor) or not found.is_floating_point():
            return found
        if found.shape == plain.shape:
            by = float((found - plain).double().norm() / plain.double().norm().clamp(1e-30))
            self.moved[node] = max(by, self.moved.get(node, 0.0))
        return found


class _NoisyMoves(_Moves, Noisy):
    """By noise."""


class _OrderedMoves(_Moves, Ordered):
    """By the order of sums."""
