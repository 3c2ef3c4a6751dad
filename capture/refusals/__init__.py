"""Explain why torch.export refused a model, in terms of the user's code.

Holds: readers of torch's errors. It must not trace a model.
"""
