"""Whether eager does what a trace says: in its other sizes, and when nothing is traced.

Enters: comparisons of a model and its trace that need no engine. They refuse, and change nothing.
"""
