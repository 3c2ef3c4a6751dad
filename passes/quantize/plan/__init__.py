"""Making, checking and storing quantization plans.

Enters: what decides about layers. It imports `passes.ir` and `passes.quantize.measure`, and
rewrites nothing.
"""
