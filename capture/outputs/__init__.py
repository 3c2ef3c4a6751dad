"""The outputs of a model: their names, and which of them an engine returns.

Holds: what is the same for eager and for a trace. It imports `enginecast.errors` and no other
folder of ours.
"""
