"""Which sizes and values the engine of a model takes: proposed, tried, and narrowed or checked.

Holds: the model itself, run on inputs, and what is decided by that. It imports no other file of
`enginecast.compiler`.
"""
