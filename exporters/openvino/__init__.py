"""Engines for OpenVINO: ONNX graphs in ops of ONNX's own.

Enters: the ONNX exporter, with OpenVINO for its reader. It must not import another target's folder.
"""
