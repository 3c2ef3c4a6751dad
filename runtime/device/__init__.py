"""The machine that an engine runs on: GPU, streams, memory, whether compiled code fits it.

Enters: what several sessions need of a machine. torch is imported only where an engine that needs
it is opened.
"""
