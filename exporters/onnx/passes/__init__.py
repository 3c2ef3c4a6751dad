"""Lowering passes into the forms that ONNX has, and its readers run well.

Holds: passes. They import `passes.ir`, the names of readers and the ops that they make, and write
no file.
"""
