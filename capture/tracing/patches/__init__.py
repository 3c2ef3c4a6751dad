"""Patches that are active during a trace, because torch.export refuses or misreads something.

Nothing is patched for longer than a trace.  No file here answers a test of values: that is
`answers`.
"""
