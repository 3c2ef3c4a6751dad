"""Which aten ops mean what to `dtype_classes`."""

import operator

from enginecast.passes.graph_edit import aten

ROOTS = frozenset({aten.rsqrt.default, aten.sqrt.default})
REDUCTIONS = frozenset(
    {
        aten.mean.dim,
        aten.mean.default,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var.dim,
        aten.linalg_vector_norm.default,
    }
)
SQUARES = frozenset({aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.square.default})
# Ops whose result needs more precision than their input: where the source raises the input, the
# result stays raised.
SENSITIVE = frozenset(
    {
        *REDUCTIONS,
        *ROOTS,
        aten.pow.Tensor_Scalar,
        aten.square.default,
        aten.reciprocal.default,
        aten.exp.default,
        aten.log.default,
        aten.softmax.int,
        aten.log_softmax.int,
        aten.cumsum.default,
        aten.layer_norm.default,
        aten.rms_norm.default,
        aten.sin.default,
        aten.cos.default,
    }
)
ELEMENTWISE_PAIR = frozenset(
    {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.where.self}
)
SHAPE_ONLY = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.contiguous.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.clone.default,
        aten.detach.default,
        aten.dropout.default,
        aten.flatten.using_ints,
        aten.split_with_sizes.default,
        aten.split.Tensor,
        aten.chunk.default,
        aten.unbind.int,
        aten.expand_as.default,
        aten.neg.default,
        operator.getitem,
    }
)
JOINS = frozenset({aten.cat.default, aten.stack.default})
# Totals and lengths outgrow fp16, and so does a small epsilon beside them: what is read off them
# stays in fp32 whatever the source says.
TOTALS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var.dim,
        aten.std.correction,
        aten.std.dim,
        aten.linalg_vector_norm.default,
    }
)
# Weighted sums over many elements: the work that a low compute dtype is for.
HEAVY = frozenset(
    {
        aten.linear.default,
        aten.matmul.default,
        aten.bmm.default,
        aten.mm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.einsum.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv2d.padding,
        aten.conv3d.default,
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.convolution.default,
        aten.embedding.default,
        aten.scaled_dot_product_attention.default,
    }
)
# Ops that write a literal into a value: it must be one of the value's dtype.
FILLS = frozenset({aten.masked_fill.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf})
LITERALS = frozenset(
    {
        *FILLS,
        aten.full.default,
        aten.full_like.default,
        aten.new_full.default,
        aten.scalar_tensor.default,
        aten.fill.Scalar,
        aten.fill_.Scalar,
        aten.masked_fill_.Scalar,
        aten.clamp.default,
        aten.clamp_.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.constant_pad_nd.default,
        aten.pad.default,
    }
)
# However large their input, these stay small.
BOUNDED = frozenset(
    {
        aten.sin.default,
        aten.cos.default,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.softmax.int,
    }
)
