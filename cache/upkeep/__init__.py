"""Looking after a cache: checking, pruning, merging, exporting, comparing.

Holds: what rewrites or reads whole caches. It never encodes a text.
"""
