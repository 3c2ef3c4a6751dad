"""Lowering passes that only TensorRT needs.

Holds: passes. They import `passes.ir` and the ops that they make.
"""
