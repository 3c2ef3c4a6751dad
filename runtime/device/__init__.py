"""The machine that an engine runs on: GPU, streams, memory, compatibility with compiled code.

Holds: what several sessions need of a machine. torch is imported only where an engine that needs
it is opened.
"""
