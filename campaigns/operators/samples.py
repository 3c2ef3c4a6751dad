"""Modules that call an operator of torch's database on its own sample inputs."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from operator_database import OPERATORS
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from enginecast.passes.presets import PrecisionName

DTYPES: Mapping[str, tuple[torch.dtype, int]] = {
    "float32": (torch.float32, 3),
    "float16": (torch.float32, 2),
    "int64": (torch.int64, 1),
    "int32": (torch.int32, 1),
    "uint8": (torch.uint8, 1),
    "bool": (torch.bool, 1),
    "complex64": (torch.complex64, 1),
}
"""Column of the table -> its dtype, and how many samples of it are tried."""
PRECISIONS: Mapping[str, PrecisionName] = {"float16": "fp16"}
"""Column -> the precision of its engines, where that is not the dtype of the samples."""
REALS = ("float32", "float16")
"""Columns of real numbers."""
READ = 120
"""Samples of the database that are looked at; some operators have thousands."""
LARGEST = 50_000
"""Elements of one input."""

DRAWS = (
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"),
    *("rand", "uniform", "nn.functional.dropout", "nn.functional.alpha_dropout"),
    *("nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool", "empty"),
    *("new_empty", "nn.functional.rrelu", "svd_lowrank", "pca_lowrank"),
)
"""Where operators begin that draw random numbers, or leave memory as it is."""
NOT_ASKED: Mapping[str, str] = {
    **{name: "draws random numbers" for name in OPERATORS if name.startswith(DRAWS)},
    "to_sparse": "gives a sparse tensor",
    "item": "gives a number",
    "arange": "takes no tensor",
    "linspace": "takes no tensor",
    "logspace": "takes no tensor",
    "eye": "takes no tensor",
    "ones": "takes no tensor",
    "zeros": "takes no tensor",
    "full": "takes no tensor",
    "scalar_tensor": "takes no tensor",
}
"""Operators that no engine could have, and why."""
NO_MODEL = (
    *(
        "jiterator",
        "_refs.",
        "_unsafe_masked_index",
        "torch.ops.",
        "masked.",
        "sparse.",
        "mvlgamma",
    ),
    *(
        "special.bessel",
        "special.modified",
        "special.scaled",
        "special.spherical",
        "special.hermite",
    ),
    *("special.chebyshev", "special.shifted", "special.laguerre", "special.legendre"),
    *("special.airy", "bmm.triton", "hash_tensor", "_segment", "_chunk_cat", "torch._scaled"),
    *("nn.functional.max_unpool1d.grad", "nn.functional.max_unpool2d.grad"),
    *("nn.functional.max_unpool3d.grad", "max_pool2d_with_indices_backward", "_softmax_backward"),
    *("native_dropout_backward", "nn.functional.linear_cross_entropy.chunked", "polygamma"),
    *("special.polygamma", "histogramdd", "_batch_norm", "_native_batch", "native_batch"),
)
"""Operators that are tools of torch's own, or of tensors that no engine takes."""
_REVERSED = re.compile(r"__r\w+__")
"""Operators of Python, of which there is another name."""
SELDOM = ("linalg.", "special.", "signal.", "igamma", "cholesky", "lu", "ldl", "ormqr", "geqrf")
"""Where operators begin of which one sample is tried."""
COMPLEX = (
    *("fft.", "view_as_", "real", "imag", "conj", "polar", "complex", "abs", "angle", "stft"),
    *("istft", "add", "sub", "mul", "div", "neg", "matmul", "bmm", "mm", "einsum", "exp", "sum"),
    *("mean", "cat", "stack", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "select"),
    *("index_select", "narrow", "split", "chunk", "flatten", "unflatten", "where", "pow", "sgn"),
    *("expand", "clone", "roll", "flip", "cumsum", "resolve_conj", "to", "type_as", "square"),
)
"""Where operators that are tried on complex numbers begin, which have a pair of real ones for each
number as inputs and outputs."""

BY_PLACE: Mapping[str, int | None] = {
    "sort": -1,
    "argsort": -1,
    "topk": -1,
    "kthvalue": -1,
    "median": -1,
    "nanmedian": -1,
    "mode": -1,
}
"""Operators that give places and leave open which of several equal elements is meant, and the
dimension along which they count unless told.  Their places are judged by the elements there."""


FIXED: Mapping[str, Sequence[int]] = {
    "nn.functional.embedding_bag": (2,),
    "bucketize": (1,),
    "searchsorted": (0, 2),
}
"""Which tensors of an operator are part of the module, for no other values fit: offsets, and
boundaries in order."""


@dataclass(frozen=True)
class Call:
    """One sample: the leaves of a call, the tensors among them by their places."""

    name: str
    op: Callable[..., Any]
    spec: Any
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    inputs: tuple[Tensor, ...]
    dtype: str
    said: str
    places_along: int | None = None

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the operator gives; complex ones as pairs of real ones."""
        waiting = iter(tensors)
        leaves = list(self.leaves)
        for place, is_complex in zip(self.places, self.is_complex, strict=True):
            given = next(waiting)
            leaves[place] = torch.view_as_complex(given) if is_complex else given
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = [
            found
            for found in pytree.tree_leaves(self.op(first, *args, **kwargs))
            if isinstance(found, Tensor)
        ]
        if self.places_along is not None:
            results = [self._elements(first, found) for found in results]
        return [
            torch.view_as_real(r.resolve_conj()) if r.is_complex() else r.clone() for r in results
        ]

    @property
    def is_complex(self) -> tuple[bool, ...]:
        """Of each input."""
        return tuple(t.is_complex() for t in self.inputs)

    def _elements(self, source: Tensor, found: Tensor) -> Tensor:
        if found.dtype != torch.int64 or not source.dim():
            return found
        dim = self.places_along
        assert dim is not None
        if found.dim() == source.dim():
            return source.gather(dim, found)
        if not found.dim() and source.dim() > 1:
            return source.reshape(-1).gather(0, found.reshape(1))
        return source.gather(dim, found.unsqueeze(dim))

    def examples(self) -> tuple[Tensor, ...]:
        """The inputs as an engine takes them: complex ones as pairs of real ones."""
        return tuple(torch.view_as_real(t) if t.is_complex() else t.clone() for t in self.inputs)


class Calls(nn.Module):
    """Several calls: each takes its tensors by name and gives its own."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls = tuple(calls)

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for number, call in enumerate(self.calls):
            found += call.run([tensors[f"x{number}_{i}"] for i in range(len(call.inputs))])
        return tuple(found)

    def example(self) -> dict[str, Tensor]:
        """Inputs by name."""
        return {
            f"x{number}_{i}": tensor
            for number, call in enumerate(self.calls)
            for i, tensor in enumerate(call.examples())
        }


class Inside(Calls):
    """The same calls of floats: those beyond 0.8e38 become infinite, and NaN beyond 1.7e38."""

    def forward(self, **tensors: Tensor) -> tuple[Tensor, ...]:
        return super().forward(
            **{name: _not_finite(x) if x.is_floating_point() else x for name, x in tensors.items()}
        )


def _not_finite(x: Tensor) -> Tensor:
    size = x.abs()  # the same in fp64, and without an infinity that a pass could see
    return x / (size < 0.8e38) * (size < 1.7e38)


def names() -> tuple[str, ...]:
    """The operators that models may call."""
    return tuple(
        name for name in OPERATORS if not name.startswith(NO_MODEL) and not _REVERSED.match(name)
    )


def calls(name: str, column: str) -> list[Call]:
    """A few samples of an operator in a dtype, as different from each other as there are."""
    op, (dtype, most) = OPERATORS[name], DTYPES[column]
    if name in NOT_ASKED or not op.supports_dtype(dtype, "cpu"):
        return []
    if column == "complex64" and not name.startswith(COMPLEX):
        return []
    if name.startswith("fft.") and not (dtype.is_floating_point or dtype.is_complex):
        return []  # one number of a row is zero by chance, and a whole one of integers
    is_half = column in PRECISIONS
    torch.manual_seed(0)
    kinds: dict[Any, list[Call]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = op.sample_inputs("cpu", dtype, requires_grad=False)
        for sample in itertools.islice(given, READ):
            call = _call(name, op.op, sample, column)
            if call is not None:
                kinds.setdefault(_kind(call), []).append(call)
        found = sorted(_spread(list(kinds.values())), key=_rank, reverse=True)
        if name.startswith(SELDOM):
            most = 1
        elif not op.supports_dtype(torch.float32, "cpu"):
            most = DTYPES["float32"][1]
        usable = (call for call in found if repeats(call, torch.float16 if is_half else None))
        return list(itertools.islice(usable, most))


def _spread(kinds: Sequence[Sequence[Call]]) -> Iterator[Call]:
    """The first of each kind, then the second of each, ..."""
    for row in itertools.zip_longest(*kinds):
        yield from (call for call in row if call is not None)


def _call(name: str, op: Callable[..., Any], sample: Any, column: str) -> Call | None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(map(_is_plain, tensors)) or sample.kwargs.get("training") is True:
        return None
    is_fixed = [at in FIXED.get(name, ()) and not _weighs(name, t) for at, t in enumerate(tensors)]
    taken = [t for t, fixed in zip(tensors, is_fixed, strict=True) if not fixed]
    places = [place for place, leaf in enumerate(leaves) if any(leaf is one for one in taken)]
    return Call(
        name,
        op,
        spec,
        tuple(None if place in places else leaf for place, leaf in enumerate(leaves)),
        tuple(places),
        tuple(t.detach().clone().contiguous() for t in taken),
        column,
        str([tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves]),
        _along(name, sample),
    )


def _weighs(name: str, tensor: Tensor) -> bool:
    """Whether a bag without offsets has weights in their place."""
    return name == "nn.functional.embedding_bag" and tensor.is_floating_point()


def _along(name: str, sample: Any) -> int | None:
    """Along which dimension an operator of `BY_PLACE` counts."""
    name = name.partition(".")[0]
    if name not in BY_PLACE:
        return None
    default = BY_PLACE[name]
    place = 1 if name in ("topk", "kthvalue") else 0
    given = sample.kwargs.get("dim", (*sample.args, None, None)[place])
    return given if isinstance(given, int) and not isinstance(given, bool) else default


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and 0 < tensor.numel() <= LARGEST


def _kind(call: Call) -> Any:
    """What makes a sample another case: the ranks, dtypes and options."""
    options = [leaf for place, leaf in enumerate(call.leaves) if place not in call.places]
    words = tuple(
        o if isinstance(o, str | bool) or o is None else type(o).__name__ for o in options
    )
    return tuple((t.dim(), t.dtype) for t in call.inputs), words, str(call.spec)


def _rank(call: Call) -> tuple[int, int]:
    """Those with many rows come first: the first input says what the batch is."""
    first = call.inputs[0]
    return (int(first.dim() > 0 and first.shape[0] > 1), 0)


def repeats(call: Call, dtype: torch.dtype | None = None) -> bool:
    """Whether two calls give the same tensors, and there are some.

    Args:
        dtype: of the floats, which results have, too; None: as the sample has them.
    """
    given = [t.to(dtype) if dtype and t.is_floating_point() else t for t in call.examples()]
    try:
        with torch.no_grad():
            first, second = (call.run([t.clone() for t in given]) for _ in range(2))
    except Exception:  # not every sample is one that the operator takes from outside
        return False
    if any(dtype not in (None, t.dtype) for t in first if t.is_floating_point()):
        return False
    return bool(first) and all(map(_same, first, second)) and all(map(_is_usable, first))


def _is_usable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())
