"""Run a program in the arithmetic of a target: real rounding and saturation, on the CPU.

Holds: kernels that round as a target's do, and profiles that say which. It knows no engine, and
must not import exporters.
"""
