"""Which paths through a model's control flow ran, and inputs that take the others.

Holds: searches for inputs. It runs the model eagerly; it must not trace it.
"""
