"""Looking after a cache: checking, pruning, merging, exporting, comparing.

Enters: what rewrites or reads whole caches. It never encodes a text.
"""
