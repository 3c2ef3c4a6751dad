"""What quantization would do to a program: calibration values and simulation.

It shares no arithmetic with the rewriting in `passes.quantize`, so that each checks the other.
"""
