"""Packages of AOTInductor: machine code compiled ahead of time.

All that names torch._inductor is here. It must not import another target's folder.
"""
