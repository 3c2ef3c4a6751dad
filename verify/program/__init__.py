"""The program after every pass, compared with what it was and with an fp64 reference.

Enters: observers of a pipeline, and floors that need a program. It runs no engine.
"""
