"""Sessions: they run the engine file of each target.

Holds: a `Session` for each target, and a line in `registry`. A session imports its engine's
library when it is opened.
"""
