"""Check, without TensorRT, whether its parser is documented to accept an ONNX model.

Holds: rules with their sources. It imports no TensorRT.
"""
