"""What a model returns: names for it, and which of it an engine gives.

Enters: what is the same for eager and for a trace. It imports `enginecast.errors` and no other
folder of ours.
"""
