"""The traits of each op: one table that passes, analyses, exporters and the emulator query.

Torch's schemas and tags say which ops write, alias, draw random numbers and are elementwise; the
other traits are listed here by op name. An in-place op has the traits of its out-of-place form.
enginecast's own ops declare theirs (`enginecast.ops`).

A pass that has a rule for each op lists those ops itself: a rule is not a trait.
"""

import operator
from functools import cache
from typing import Any, TypeGuard

import torch
from torch.fx import Node

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.library_names import aten
from enginecast.ops.traits import NONE, OWN, Trait

__all__ = ["Trait", "has", "is_identity", "listed", "traits_of"]

MOVES, CASTS, EXACT, ALIASES = Trait.MOVES, Trait.CASTS, Trait.EXACT, Trait.ALIASES
LITERAL, ARITHMETIC, ROUNDED = Trait.LITERAL, Trait.ARITHMETIC, Trait.CORRECTLY_ROUNDED
REDUCES, SENSITIVE, BOUNDED = Trait.REDUCES, Trait.SENSITIVE, Trait.BOUNDED

_ROWS = (
    # Elements go from place to place.
    (MOVES | Trait.IDENTITY, "alias clone contiguous detach lift lift_fresh lift_fresh_copy"),
    (MOVES | Trait.IDENTITY | ALIASES, "dropout alpha_dropout feature_dropout"),
    (MOVES | Trait.RESHAPES, "_reshape_alias flatten ravel reshape reshape_as squeeze unflatten"),
    (MOVES | Trait.RESHAPES, "unsqueeze view_as view_copy squeeze_copy unsqueeze_copy"),
    (MOVES | Trait.RESHAPES | Trait.STRIDE_BOUND, "view _unsafe_view"),
    (MOVES | Trait.STRIDE_BOUND, "as_strided"),
    (MOVES | Trait.PERMUTES, "mT matrix_H moveaxis movedim numpy_T permute swapaxes swapdims t"),
    (MOVES | Trait.PERMUTES, "transpose"),
    (MOVES, "broadcast_to expand expand_as expand_copy repeat tile diagonal flip roll rot90"),
    (MOVES, "chunk narrow select slice split split_with_sizes tensor_split unbind unfold"),
    (MOVES, "channel_shuffle hsplit pixel_shuffle pixel_unshuffle real imag view_as_real"),
    (MOVES | ALIASES, "unsafe_chunk unsafe_split unsafe_split_with_sizes"),
    (MOVES | ALIASES, "atleast_1d atleast_2d atleast_3d"),
    (Trait.GATHERS, "gather index index_select masked_select repeat_interleave take"),
    (Trait.GATHERS, "embedding take_along_dim"),
    (Trait.JOINS, "cat column_stack concat concatenate dstack hstack stack vstack"),
    (EXACT, "copy index_copy masked_scatter scatter select_scatter slice_scatter tril triu"),
    (ALIASES, "_unsafe_view einsum"),
    (EXACT | ALIASES, "broadcast_tensors conj_physical meshgrid"),
    (CASTS, "_to_copy to"),
    (CASTS | ALIASES, "type_as"),
    (Trait.STRIDE_BOUND, "view.dtype"),
    # Arithmetic, element by element.
    (ARITHMETIC | ROUNDED, "add div divide mul multiply rsub sub subtract true_divide"),
    (ARITHMETIC | ROUNDED | EXACT, "fmax fmin maximum minimum where"),
    (ARITHMETIC | ROUNDED, "masked_fill"),
    (ARITHMETIC | ROUNDED | LITERAL, "where.Scalar"),
    (ARITHMETIC | ROUNDED | LITERAL | Trait.FILLS, "where.ScalarOther where.ScalarSelf"),
    (ROUNDED | LITERAL | Trait.FILLS, "masked_fill.Scalar"),
    (ROUNDED | EXACT | Trait.NOT_LARGER | Trait.HOMOGENEOUS, "abs neg relu"),
    (ROUNDED | EXACT, "ceil floor round sgn sign trunc"),
    (ROUNDED, "copy fill leaky_relu ones_like reciprocal sqrt square threshold zeros_like"),
    (Trait.ELEMENTWISE | ROUNDED | EXACT, "__and__ __or__"),
    (Trait.ELEMENTWISE, "floor_divide hardswish log_sigmoid prelu"),
    (ROUNDED | Trait.CLAMPS, "relu6"),
    (ROUNDED | Trait.CLAMPS | LITERAL, "clamp clamp_max clamp_min clip hardtanh"),
    (Trait.NOT_LARGER, "gelu hardswish mish silu"),
    (BOUNDED, "cos erf sigmoid sin softmax _softmax tanh"),
    (LITERAL, "fill full full_like new_full scalar_tensor"),
    (LITERAL | EXACT, "constant_pad_nd pad"),
    (SENSITIVE, "cos exp exp2 expm1 log log10 log1p log2 pow reciprocal rsqrt sin sqrt square"),
    # Sums, and what is made of them.
    (REDUCES | EXACT, "_is_all_true all amax amin any"),
    (REDUCES, "argmax argmin logsumexp max min prod"),
    (ROUNDED | EXACT, "max.other min.other"),
    (REDUCES | SENSITIVE | Trait.HOMOGENEOUS, "mean sum"),
    (REDUCES | SENSITIVE, "linalg_vector_norm norm std std_mean var var_mean"),
    (Trait.ACCUMULATES, "linalg_vector_norm norm std std_mean sum var var_mean"),
    (SENSITIVE, "_log_softmax _softmax cumsum log_softmax softmax"),
    (SENSITIVE, "group_norm layer_norm native_group_norm native_layer_norm rms_norm"),
    (Trait.HEAVY, "addbmm addmm addmv baddbmm bilinear bmm dot einsum linear matmul mm mv"),
    (Trait.HEAVY | Trait.CONVOLVES, "conv1d conv2d conv3d"),
    (
        Trait.HEAVY | Trait.CONVOLVES | Trait.TRANSPOSED,
        "conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    (Trait.RECURS, "gru.input lstm.input rnn_relu.input rnn_tanh.input"),
    (Trait.HEAVY, "_convolution _int_mm _scaled_mm convolution scaled_dot_product_attention"),
    (Trait.HEAVY, "embedding transformers.grouped_mm_fallback"),
    (Trait.GROWS, "exp exp2 expm1 log log10 log1p log2 logit pow reciprocal rsqrt tan"),
    # Along some dimensions.
    (Trait.ALONG, "_log_softmax _softmax all amax amin any argmax argmin argsort cat chunk cummax"),
    (Trait.ALONG, "cumprod cumsum flip glu linalg_vector_norm log_softmax logsumexp max mean min"),
    (Trait.ALONG, "narrow norm prod roll select slice softmax sort split split_with_sizes stack"),
    (Trait.ALONG, "std sum topk unbind unsafe_chunk unsafe_split var"),
    # Torch's kernels take fp32 and fp64 alone, on the CPU or at all.
    (Trait.WIDE, "_cdist_forward _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh"),
    (Trait.WIDE, "_linalg_slogdet _linalg_solve_ex _linalg_svd avg_pool3d cdist cholesky"),
    (Trait.WIDE, "cholesky_inverse cholesky_solve complex det geqrf histc inverse istft"),
    (Trait.WIDE, "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig"),
    (Trait.WIDE, "linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product"),
    (Trait.WIDE, "linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex"),
    (Trait.WIDE, "linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex"),
    (Trait.WIDE, "linalg_lu_solve linalg_matrix_exp linalg_matrix_power linalg_matrix_rank"),
    (Trait.WIDE, "linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex"),
    (Trait.WIDE, "linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv"),
    (Trait.WIDE, "linalg_tensorsolve logdet lu_solve lu_unpack matrix_exp nanquantile ormqr"),
    (Trait.WIDE, "pinverse polar qr quantile slogdet stft svd triangular_solve view_as_complex"),
    (Trait.WIDE, "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2"),
    (Trait.WIDE, "fft_rfftn fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn"),
    (Trait.WIDE, "fft_ihfft fft_ihfft2 fft_ihfftn"),
    # What reads sizes alone, or nothing.
    (Trait.METADATA, "empty_like full_like new_empty new_full new_ones new_zeros ones_like"),
    (Trait.METADATA, "rand_like randn_like sym_numel sym_size sym_storage_offset zeros_like"),
    (Trait.METADATA | Trait.STRIDE_BOUND, "sym_stride"),
    (Trait.CREATES, "arange empty eye full linspace ones rand randint randn randperm"),
    (Trait.CREATES, "scalar_tensor tril_indices triu_indices zeros"),
    (Trait.CHECKS | Trait.METADATA, "_assert_tensor_metadata"),
    (Trait.CHECKS, "_assert_async _assert_scalar sym_constrain_range sym_constrain_range_for_size"),
    # None of these.
    (NONE, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d argsort avg_pool1d"),
    (NONE, "avg_pool2d batch_norm bincount bucketize count_nonzero cross_entropy_loss cumprod"),
    (NONE, "diff feature_alpha_dropout glu grid_sampler im2col index_add index_put"),
    (NONE, "index_reduce instance_norm item max_pool1d max_pool2d max_pool3d"),
    (NONE, "multinomial nonzero normal one_hot scatter_add scatter_reduce searchsorted sort"),
    (NONE, "mse_loss topk unique_dim"),
    (NONE, "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d"),
    (NONE, "upsample_nearest2d upsample_nearest3d upsample_trilinear3d"),
)


_TABLE: dict[str, Trait] = {}
for _traits, _names in _ROWS:
    for _name in _names.split():
        _TABLE[_name] = _TABLE.get(_name, NONE) | _traits
_IMPLIED = (
    (MOVES, EXACT | Trait.NOT_LARGER | Trait.HOMOGENEOUS),
    (Trait.GATHERS, EXACT | Trait.NOT_LARGER | Trait.HOMOGENEOUS),
    (Trait.JOINS, EXACT | Trait.NOT_LARGER),
    (CASTS, Trait.HOMOGENEOUS),
    (ARITHMETIC, Trait.ELEMENTWISE),
)


def listed(op: Any) -> Trait | None:
    """The table's traits of an op; None if it is not listed.

    Python functions are not listed: except for `getitem`, they take numbers.
    """
    if op is operator.getitem:
        return MOVES | ALIASES
    if not isinstance(op, torch._ops.OpOverload):
        return NONE
    if op in OWN:
        return OWN[op].traits
    name, _, overload = str(op).removeprefix("aten.").rpartition(".")
    if not name.endswith("__"):
        name = name.removesuffix("_")
    return _TABLE.get(f"{name}.{overload}", _TABLE.get(name))


@cache
def traits_of(op: Any) -> Trait:
    """All traits of an op, from the table and from torch's schema and tags."""
    traits = listed(op) or NONE
    for trait, implied in _IMPLIED:
        if trait in traits:
            traits |= implied
    if not isinstance(op, torch._ops.OpOverload):
        return traits
    if torch.Tag.pointwise in op.tags:
        traits |= Trait.ELEMENTWISE
    if torch.Tag.nondeterministic_seeded in op.tags and Trait.UNFOLDABLE not in traits:
        traits |= Trait.RANDOM
    if any(result.alias_info is not None for result in op._schema.returns):
        traits |= ALIASES
    if op._schema.is_mutable and op is not aten.detach_.default:
        traits |= Trait.WRITES  # detach_ says so, and changes what autograd knows alone
    return traits


def has(node: object, *traits: Trait) -> TypeGuard[Node]:
    """Whether a node calls an op with one of these traits; traits joined with `|` must all hold."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    found = traits_of(node.target)._value_
    for trait in traits:  # passes ask this a million times: neither a generator nor enum's `in`
        wanted = trait._value_
        if wanted & found == wanted:
            return True
    return False


def is_identity(node: object) -> TypeGuard[Node]:
    """Whether a node returns its first argument unchanged, as inactive dropout does."""
    if not has(node, Trait.IDENTITY):
        return False
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", False)
    return not (has(node, Trait.RANDOM) and training)
