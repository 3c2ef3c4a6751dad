"""Inputs of a model: their names, kinds, dtypes and ranges, and values that fit.

Holds: what describes, reads or draws inputs, and maps them to the arguments of `forward`. It knows
no source, and must not trace a model.
"""
