"""Where a model's Python code decides by the values of tensors: what witnesses saw.

Enters: recorders of runs and readers of torch's reports. They decide nothing, and must not import
converters or operators.
"""
