"""Carrying out a quantization plan: what `fp8-matmul` and `int8-matmul` share.

Plans are made in `plan`, measured in `measure`.
"""
