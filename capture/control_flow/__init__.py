"""Control flow in a model's Python code: found, covered by inputs, and rewritten.

All code is in the folders `detect`, `cover`, `converters` and `operators`. None of them traces a
whole model.
"""
