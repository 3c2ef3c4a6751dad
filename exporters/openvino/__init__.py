"""Engines for OpenVINO: ONNX graphs that use only standard ops.

Holds: the ONNX exporter, with OpenVINO for its reader. It must not import another target's folder.
"""
