"""What TensorRT-RTX takes of each operator of ONNX: the table of the TensorRT gate.

`networks` makes models of one operator from `networks.txt`, `ask` has them parsed and built, `run`
writes the table (`make trt-gate`).
"""
