"""Inputs of a model: their names, kinds, dtypes and ranges, and values that fit.

Holds: what describes, reads or draws inputs. It must not trace a model.
"""
