"""Where a model's Python code branches on tensor values, as the witnesses saw it.

Holds: recorders of runs and readers of torch's reports. They decide nothing, and must not import
converters or operators.
"""
