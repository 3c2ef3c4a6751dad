"""The command line: one file a command, a thin skin over `enginecast.compiler` and the Python API.

Holds: parsing of options, and what a command prints. Nothing that decides about a model. Only the
entry point, `enginecast.__main__`, imports this folder.
"""
