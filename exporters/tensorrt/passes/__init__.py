"""Lowering passes that TensorRT alone needs.

Enters: passes. They import `passes.ir` and the ops that they make.
"""
