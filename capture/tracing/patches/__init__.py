"""Patches that are active during a trace, because torch.export refuses or misreads something.

Holds: context managers, one file for what they patch; nothing may be patched for longer than a
trace. No file here answers a test of values: that is `answers`.
"""
