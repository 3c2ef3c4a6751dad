"""What every command shares with the terminal: options, output, errors.

Holds: help texts, older names of options, tables, progress. It knows no command.
"""
