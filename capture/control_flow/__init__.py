"""Control flow in a model's Python code: found, covered by inputs, and rewritten.

Its folders: `detect`, `cover`, `converters`, `operators`. No file stands at this level, and none of
the folders traces a whole model.
"""
