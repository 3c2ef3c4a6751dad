"""Trace a model with torch.export: from a source to a program bound to its weights.

Holds: what puts the folders together (`export.py`). They may import each other in this order:
`patches`, `answers`, `program` and `state`; `ladder`; `checks`. Beside them they import `passes.ir`
and no pass; only `enginecast`, `enginecast.compiler` and `enginecast.testing` import them.
"""
