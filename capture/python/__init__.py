"""Tools for Python code: source locations, swapping code during a trace, silencing libraries.

Holds: what knows nothing of models. It imports `enginecast.errors` and no other folder of ours.
"""
