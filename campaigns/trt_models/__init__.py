"""The networks of the zoo and of vision, built by TensorRT-RTX: which are, and why others are not.

`examine` lowers a model as an export does, `page` keeps the results and writes
docs/results/tensorrt.md, `run` is the command (`make trt-models`).
"""
