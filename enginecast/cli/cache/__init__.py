"""`enginecast cache`: commands and pages of the embedding cache.

Holds: options and pages. It imports `enginecast.cache`, `runtime` and `cli.terminal`; torch is
imported only to run a model eagerly.
"""
