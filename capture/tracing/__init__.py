"""Trace a model with torch.export, by the first attempt of a list that gives what eager computes.

Holds: the list (`ladder`), one trace (`torch_export`), and what becomes of it (`captured`).
"""
