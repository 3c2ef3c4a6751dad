"""Python code as such: source locations, swapping code during a trace, keeping libraries quiet.

Enters: what knows nothing of models. It imports `enginecast.errors` and no other folder of ours.
"""
