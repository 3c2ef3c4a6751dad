"""`enginecast passes`: every pass that is known, and the start of one of your own.

Holds: the table of the passes, and the package that `passes new` writes. It runs no pass.
"""
