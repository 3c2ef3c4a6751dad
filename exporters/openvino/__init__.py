"""Engines for OpenVINO: ONNX graphs that use only standard ops.

Enters: the ONNX exporter, with OpenVINO for its reader. It must not import another target's folder.
"""
