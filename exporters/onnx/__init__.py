"""The ONNX graph of a program, and its files.

Holds: the translation of each op, and what writes the graph. Rewrites of the program are passes,
in `passes`. It imports no other target but `torchscript`, whose files it can write as ONNX.
"""
