"""Operators of our own, which stand in a program between the passes and a target.

A file for each: definition, fake kernel, traits.  Importing this package registers them all.  It
imports torch and nothing else of ours.
"""

from enginecast.ops import attention as attention
from enginecast.ops import blockwise_linear as blockwise_linear
from enginecast.ops import cached_attention as cached_attention
from enginecast.ops import quantize as quantize
from enginecast.ops import quantized_conv as quantized_conv
from enginecast.ops import quantized_gru as quantized_gru
from enginecast.ops import quantized_linear as quantized_linear
from enginecast.ops import quantized_lstm as quantized_lstm
from enginecast.ops import skip_rms_norm as skip_rms_norm
from enginecast.ops import values_of_bytes as values_of_bytes
from enginecast.ops import whole_rms_norm as whole_rms_norm
