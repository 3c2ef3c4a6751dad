"""What passes ask of a program: analyses that change nothing.

Enters: an analysis, whoever asks it. It imports `passes.ir` and `ops`; it must not import passes.
"""
