"""Times of an engine beside its peers: one run, in turns, with accuracy beside each time.

Holds: a bundle, and the model that it was made from.  Needs torch for peers alone.
"""
