"""Inputs of a model that comes without examples, from its config and its `forward`.

Holds: one file for each modality, a function for each argument name. It runs nothing.
"""
