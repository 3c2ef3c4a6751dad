"""Answers for code that reads a tensor's values during a trace, or asks whether it is traced.

Holds: an answer that is right in every call, or one that guards of the program keep.
"""
