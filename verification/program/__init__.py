"""Compare the program after every pass with the program before, and with an fp64 reference.

Holds: observers of a pipeline, and floors that need a program. It runs no engine.
"""
