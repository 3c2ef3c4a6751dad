"""Check whether TensorRT takes an ONNX model: with its parser, or by the answers that it gave.

Holds: the table of what TensorRT-RTX answered of each operator, and the rules that a table cannot
say.  It imports no TensorRT: its callers hand it in.
"""
