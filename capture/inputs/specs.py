"""Inputs of a model: names, kinds, dtypes, and which dimensions may vary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from enginecast.capture.inputs.text_config import (
    ending_of,
    longest_sequence,
    padding_of,
    parts_of,
    placeholders_of,
    text_of,
)
from enginecast.errors import UsageError

Kind = Literal["token_ids", "attention_mask", "token_type_ids", "position_ids", "image", "tensor"]
Origin = Literal["known", "example", "asked"]
Draws = Literal[
    "any", "marked", "sorted", "between", "values", "shuffled", "rows", "samples", "kept"
]
"""How values are drawn that must fit one another: see `fitting`."""

BATCH = "batch"
SEQUENCE = "sequence"
LARGEST_BATCH = 64
LARGEST_SUM = 2**31 - 1
BOXES = "bbox"

TEXT_INPUTS: dict[str, Kind] = {
    "input_ids": "token_ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "token_type_ids",
}


@dataclass(frozen=True)
class DimSpec:
    """One dimension of an input.

    Args:
        name: symbol shared by all dimensions that must be equal; None for a static dimension.
        size: its size in the traced example.
        minimum: smallest size that the engine takes.
        maximum: largest size that the engine takes.
        asked: whether the user gave the range; it is then refused rather than narrowed.
        given: its size in the user's inputs; None if inputs were derived.
        step: all sizes are multiples of it, including the smallest and the largest.
        parts: names and example sizes of the dimensions that this one is the sum of, such as past
            and new tokens for a mask over both; empty: it is not a sum.
        cap: largest allowed sum.
    """

    name: str | None
    size: int
    minimum: int
    maximum: int
    asked: bool = field(default=False, compare=False)
    given: int | None = field(default=None, compare=False)
    step: int = 1
    parts: tuple[tuple[str, int], ...] = ()
    cap: int = LARGEST_SUM

    @classmethod
    def static(cls, size: int) -> "DimSpec":
        return cls(None, size, size, size)

    @classmethod
    def sum_of(cls, name: str, parts: Sequence["DimSpec"], cap: int = LARGEST_SUM) -> "DimSpec":
        """A dimension named `name` that is the sum of others."""
        low, high = sum(p.minimum for p in parts), min(cap, sum(p.maximum for p in parts))
        sizes = tuple((str(part.name), part.size) for part in parts)
        return cls(name, sum(p.size for p in parts), low, high, parts=sizes, cap=cap)

    def size_in(self, sizes: Mapping[str, int]) -> int:
        """Its size if named dimensions have the given sizes, and others the example's."""
        if self.parts:
            return sum(sizes.get(name, size) for name, size in self.parts)
        return self.size if self.name is None else sizes.get(self.name, self.size)

    @property
    def sizes(self) -> range:
        """All sizes that the engine accepts."""
        return range(self.minimum, self.maximum + 1, self.step)

    @property
    def shown(self) -> str:
        """The sizes in the syntax of `--dynamic`."""
        step = f"/{self.step}" if self.step > 1 else ""
        return "..".join(map(str, dict.fromkeys((self.minimum, self.maximum)))) + step

    def fit(self, size: int) -> int:
        """The accepted size nearest to this one, not larger if possible."""
        size = min(max(size, self.minimum), self.maximum)
        return size - size % self.step


@dataclass(frozen=True)
class InputSpec:
    """One input: the meaning of its values, and its shape."""

    name: str
    kind: Kind
    dtype: torch.dtype
    dims: tuple[DimSpec, ...]
    low: int | None = None
    """Smallest value of an integer input."""
    high: int | None = None
    """Largest value of an integer input, e.g. the last id of the vocabulary."""
    padding: int | None = None
    """Id that fills up a row of token ids."""
    ending: int | None = None
    """Id that every text ends with.  Delimiters are where trained models have their largest values
    (Sun et al. 2024, https://arxiv.org/abs/2402.17762), so drawn texts end with it, too."""
    is_box: bool = False
    """Whether rows are boxes (left, top, right, bottom): models look up their widths and heights,
    which must not be negative."""
    places: tuple[tuple[int, int], ...] = ()
    """Column and id of the placeholders in every row of token ids: one per image or audio
    feature."""
    reserved: frozenset[int] = frozenset()
    """Placeholder ids, which occur only at `places`."""
    origin: Origin = "known"
    """Where the range of values comes from: "known" from a config or the kind of input, "example"
    is only what the example held, "asked" is what the user wants."""
    draws: Draws = "any"
    marks: frozenset[int] = frozenset()
    """Values that occur as often in each row as in the example: in all cases if "marked" is how
    values are drawn, else in some."""
    held: Tensor | None = field(default=None, compare=False, repr=False)
    """The example, where values are drawn from it."""

    @property
    def is_whole(self) -> bool:
        """Whether it holds integers with a known range."""
        return self.low is not None and self.high is not None

    @property
    def is_unbounded(self) -> bool:
        """Whether it holds floats without a known range."""
        is_mask = self.kind == "attention_mask"
        return self.dtype.is_floating_point and self.low is None and not is_mask

    @property
    def is_free(self) -> bool:
        """Whether each value may be any in the range."""
        return self.draws == "any"

    @property
    def is_searched(self) -> bool:
        """Whether values can be replaced by one of the range's ends."""
        return self.draws in ("any", "marked", "sorted")


def named_dims(specs: Sequence[InputSpec]) -> dict[str, DimSpec]:
    """The independently varying dimensions, by name."""
    return {
        dim.name: dim
        for spec in specs
        for dim in spec.dims
        if dim.name is not None and not dim.parts
    }


def dim_place(specs: Sequence[InputSpec], name: str) -> str:
    """The first dimension of a name, as `--dynamic` has it: "x:1"."""
    return next(
        f"{spec.name}:{index}"
        for spec in specs
        for index, dim in enumerate(spec.dims)
        if dim.name == name
    )


def sums(specs: Sequence[InputSpec]) -> dict[str, DimSpec]:
    """The dimensions that are sums of others, by name."""
    return {str(dim.name): dim for spec in specs for dim in spec.dims if dim.parts}


def with_sums(specs: Sequence[InputSpec]) -> tuple[InputSpec, ...]:
    """The inputs, with the sizes of sums updated from their parts."""
    dims = named_dims(specs)

    def summed(dim: DimSpec) -> DimSpec:
        if not dim.parts:
            return dim
        # A part that a range of one size made static is known by its size.
        parts = [dims.get(n) or replace(DimSpec.static(size), name=n) for n, size in dim.parts]
        return DimSpec.sum_of(str(dim.name), parts, dim.cap)

    return tuple(replace(spec, dims=tuple(map(summed, spec.dims))) for spec in specs)


def ranges_of(specs: Sequence[InputSpec]) -> dict[str, tuple[int, int]]:
    """Smallest and largest size of each varying dimension."""
    every = {**named_dims(specs), **sums(specs)}
    return {name: (dim.minimum, dim.maximum) for name, dim in every.items()}


def sizes_of(specs: Sequence[InputSpec], inputs: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that vary, by their names, of inputs that have a shape."""
    return {
        dim.name: size
        for spec in specs
        for dim, size in zip(spec.dims, inputs[spec.name].shape, strict=True)
        if dim.name is not None
    }


def count_elements(specs: Sequence[InputSpec], sizes: Mapping[str, int]) -> int:
    """How many elements inputs of these sizes have."""
    return sum(math.prod(dim.size_in(sizes) for dim in spec.dims) for spec in specs)


def from_example(
    example: Mapping[str, Tensor],
    config: PreTrainedConfig | None = None,
    *,
    of_pipeline: bool = False,
    no_batch: bool = False,
) -> tuple[InputSpec, ...]:
    """Inputs of a model from one example of each.

    Dimension 0 is the batch where it is that of the first input, of two or more: others, such as
    the positions of an image's patches, may be the same for all rows. Two-dimensional integer
    `input_ids` and masks are known for what they are: their dimension 1 is the sequence.  So are
    four-dimensional `pixel_values`.  With either, and in calls of a pipeline's components, a batch
    of one may grow. Inputs of any float dtype are fp32, as the captured module is. Placeholders,
    whose ids the config names, keep their columns in every row.

    Args:
        example: one tensor for each input.
        config: the model's config.
        of_pipeline: whether it is a call of a pipeline's component.
        no_batch: whether none varies: image sizes are part of the model, or it takes one image.

    Raises:
        UsageError: the example is empty, or has complex numbers.
    """
    if not example:
        raise UsageError("the example inputs are empty", hint="Give at least one input.")
    for name, tensor in example.items():
        if tensor.is_complex():
            found = str(tensor.dtype).removeprefix("torch.")
            raise UsageError(
                f"the input {name!r} is {found}, expected real numbers: engines take no complex"
                " inputs",
                hint="Give torch.view_as_real(x), to a module that begins with"
                " torch.view_as_complex.",
            )
    kinds = {name: kind_of(name, tensor) for name, tensor in example.items()}
    is_known = set(kinds.values()) != {"tensor"}
    # An input surely has a batch if its kind is known, or that of none is.
    main = [t for n, t in example.items() if kinds[n] != "tensor" or not is_known]
    leading = [tensor.shape[0] for tensor in main if tensor.ndim]
    batch = leading[0] if leading and leading[0] >= (1 if is_known or of_pipeline else 2) else None
    batch = None if no_batch else batch
    places, reserved = _placeholders(example, kinds, config)
    least = max((column + 1 for column, _ in places), default=1)
    text = {name for name, kind in kinds.items() if kind in TEXT_INPUTS.values()}
    lengths = {example[name].shape[1] for name in text}
    longest = 1
    if lengths:  # of an example the model takes what there is
        longest = max(longest_sequence(config, max(lengths)), *lengths)
    specs = []
    for name, tensor in example.items():
        dims = [DimSpec.static(size) for size in tensor.shape]
        if tensor.ndim and tensor.shape[0] == batch:
            dims[0] = DimSpec(BATCH, batch, 1, max(LARGEST_BATCH, batch), given=batch)
        if (name in text or _marks(tensor, name, example, kinds)) and len(lengths) == 1:
            tokens = tensor.shape[1]
            dims[1] = DimSpec(SEQUENCE, tokens, least, longest, given=tokens)
        kind = kinds[name]
        low, high, origin = _id_range(name, tensor, config)
        padding, ending = (None, None)
        if kind == "token_ids":
            padding, ending = padding_of(config), ending_of(config)
        dtype = captured_dtype(tensor)
        is_box = name == BOXES and low is not None and tensor.shape[-1:] == (4,)
        spec = InputSpec(name, kind, dtype, tuple(dims), low, high, padding, ending, is_box)
        if kind == "token_ids":
            spec = replace(spec, places=places, reserved=reserved)
        specs.append(replace(spec, origin=origin))
    return with_example_sizes(tuple(specs))


def _placeholders(
    example: Mapping[str, Tensor], kinds: Mapping[str, Kind], config: PreTrainedConfig | None
) -> tuple[tuple[tuple[int, int], ...], frozenset[int]]:
    """Column and id of the placeholders in each row, and their ids; empty if rows differ."""
    ids = next((example[name] for name, kind in kinds.items() if kind == "token_ids"), None)
    parts = () if config is None else parts_of(config)
    known = frozenset(id_ for part in parts for id_ in placeholders_of(part).values())
    if ids is None or not known:
        return (), frozenset()
    rows = [[(i, id_) for i, id_ in enumerate(row) if id_ in known] for row in ids.tolist()]
    same = bool(rows[0]) and all(row == rows[0] for row in rows)
    return (tuple(rows[0]), known) if same else ((), frozenset())


def _marks(
    tensor: Tensor, name: str, example: Mapping[str, Tensor], kinds: Mapping[str, Kind]
) -> bool:
    """Whether an input holds a zero or one for each token."""
    ids = next((example[name] for name, kind in kinds.items() if kind == "token_ids"), None)
    if ids is None or kinds[name] != "tensor" or "mask" not in name or tensor.shape != ids.shape:
        return False
    return not tensor.is_floating_point() and bool(((tensor == 0) | (tensor == 1)).all())


def with_held_marks(
    specs: tuple[InputSpec, ...], example: Mapping[str, Tensor]
) -> tuple[InputSpec, ...]:
    """The inputs, with masks restricted to the tokens that they mark in every row: one per image
    feature.
    """
    kinds = {spec.name: spec.kind for spec in specs}
    held, least = {}, 1
    for spec in specs:
        tensor = example[spec.name]
        if not spec.is_whole or not _marks(tensor, spec.name, example, kinds):
            continue
        columns = tensor[0].nonzero().flatten().tolist()
        if columns and bool((tensor == tensor[0]).all()):
            places = tuple((column, 1) for column in columns)
            held[spec.name] = replace(spec, places=places, reserved=frozenset({1}))
            least = max(least, columns[-1] + 1)

    def longer(dim: DimSpec) -> DimSpec:
        return replace(dim, minimum=max(dim.minimum, least)) if dim.name == SEQUENCE else dim

    found = (held.get(spec.name, spec) for spec in specs)
    wider = tuple(replace(spec, dims=tuple(map(longer, spec.dims))) for spec in found)
    return with_example_sizes(wider) if held else specs


def captured_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor at capture: all modules are captured in fp32."""
    return torch.float32 if tensor.is_floating_point() else tensor.dtype


def with_example_sizes(specs: tuple[InputSpec, ...]) -> tuple[InputSpec, ...]:
    """Give all named dimensions pairwise different example sizes of two or more.

    torch.export takes two dimensions of one size for one dimension, and a size of 1 for a constant;
    so no two names share a size, nor does a name share one with a static dimension.
    A name whose range leaves only one size becomes static.
    """
    taken = {dim.size for spec in specs for dim in spec.dims if dim.name is None}
    chosen: dict[str, int] = {}
    for spec in specs:
        for dim in spec.dims:
            if dim.name is None or dim.name in chosen or dim.minimum == dim.maximum or dim.parts:
                continue
            least = min(max(dim.minimum, 2 * dim.step), dim.maximum)
            candidates = (*_candidates(dim, spec.kind), *dim.sizes)
            allowed = (size for size in candidates if size in dim.sizes and size >= least)
            free = (size for size in allowed if size not in taken)
            chosen[dim.name] = next(free, least)
            taken.add(chosen[dim.name])
    return with_sums(
        [replace(spec, dims=tuple(_sized(dim, chosen) for dim in spec.dims)) for spec in specs]
    )


def _candidates(dim: DimSpec, kind: Kind) -> list[int]:
    if kind == "image" and dim.name != BATCH:  # sizes that patches of the same size still divide
        return [dim.size, dim.size * 3 // 2, dim.size * 2, dim.size * 3]
    return [dim.size, *range(dim.size + 1, dim.size + 9)]


def _sized(dim: DimSpec, chosen: Mapping[str, int]) -> DimSpec:
    if dim.parts:
        sizes = tuple((name, chosen.get(name, size)) for name, size in dim.parts)
        return replace(dim, parts=sizes)
    if dim.name is None:
        return dim
    if dim.name not in chosen:
        return DimSpec.static(dim.minimum)
    return replace(dim, size=chosen[dim.name])


def kind_of(name: str, tensor: Tensor) -> Kind:
    """The kind of an input, from its name, rank and dtype."""
    if name in TEXT_INPUTS and tensor.ndim == 2 and not tensor.is_floating_point():
        return TEXT_INPUTS[name]
    is_image = name == "pixel_values" and tensor.ndim == 4 and tensor.is_floating_point()
    return "image" if is_image else "tensor"


def _id_range(
    name: str, tensor: Tensor, config: PreTrainedConfig | None
) -> tuple[int | None, int | None, Origin]:
    """The range of an input's values, and its origin."""
    kind = kind_of(name, tensor)
    if kind == "attention_mask":
        return 0, 1, "known"
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return None, None, "known"
    vocabulary = getattr(text_of(config), "vocab_size", None) if config else None
    if kind == "token_ids" and isinstance(vocabulary, int):
        return 0, vocabulary - 1, "known"
    if tensor.numel() == 0:
        return 0, 0, "example"
    low, high = int(tensor.min()), int(tensor.max())
    if "mask" in name and low in (0, 1) and high in (0, 1):
        return 0, 1, "known"
    return low, high, "example"
