"""Run TensorRT engines.

Enters: what only this session needs. TensorRT is imported when an engine is opened, through
`library` alone.
"""
