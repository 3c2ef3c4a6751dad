"""Run TensorRT engines.

Holds: what only this session needs. TensorRT is imported when an engine is opened, through
`library` alone.
"""
