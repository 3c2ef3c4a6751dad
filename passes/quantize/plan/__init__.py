"""Making, checking and storing quantization plans.

Holds: what decides about layers. It imports `passes.ir` and `passes.quantize.measure`, and
rewrites nothing.
"""
