"""Filling a cache: texts become chunks, chunks become shards, here or on several workers.

Holds: sources of texts, and runners of a schedule. It imports `cache.store` and `cache.encoders`;
Ray, pyarrow and datasets inside functions.
"""
