"""Control flow in a model's Python code: found, covered by inputs, and rewritten.

Its folders: `detect`, `cover`, `converters`, `operators`. There are no modules at this level, and
none of the folders traces a whole model.
"""
