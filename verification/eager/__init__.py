"""Eager's outputs and eager's own error: the reference that engines are judged by.

Holds: runs of eager in several dtypes, the noise of other kernels, and whether a captured program
is the model. It runs no engine.
"""
