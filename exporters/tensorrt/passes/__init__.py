"""Lowering passes that only TensorRT needs.

Enters: passes. They import `passes.ir` and the ops that they make.
"""
