"""Check that eager does what the trace says: at other sizes, and outside of a trace.

Holds: comparisons of a model and its trace that need no engine. They refuse, and change nothing.
"""
