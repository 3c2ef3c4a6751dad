"""What every command shares with the terminal: options, output, errors.

Holds: help texts, tables, progress. It imports `enginecast.errors` and no other folder of ours.
"""
