"""Whether TensorRT's parser is documented to take an ONNX model, found without TensorRT.

Enters: rules with their sources. It imports no TensorRT.
"""
