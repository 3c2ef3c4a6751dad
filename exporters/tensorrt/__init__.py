"""TensorRT engines: from ONNX through TensorRT's parser, or with torch_tensorrt.

tensorrt and torch_tensorrt are imported inside the functions that need them. Of the other targets
it imports `onnx` alone.
"""
