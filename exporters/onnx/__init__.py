"""The ONNX graph of a program, and its files.

Holds: what writes the graph.  The form of each op is in `ops`, and rewrites of the program are
passes, in `passes`.  It imports no other target but `torchscript`, whose files it can write as
ONNX.
"""
