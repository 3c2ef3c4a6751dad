"""Analyses that passes run on a program; they change nothing.

Enters: an analysis, whoever asks it. It imports `passes.ir` and `ops`; it must not import passes.
"""
