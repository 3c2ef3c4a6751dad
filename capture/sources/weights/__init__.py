"""The weights of a model and the modules that hold them: read, checked, widened, copied, left out.

Holds: what several kinds of MODEL need. It knows none of them.
"""
