"""TorchScript files.

It has no program, hence no passes, and must not import another target's folder.
"""
