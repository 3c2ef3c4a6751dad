"""An export from beginning to end: of a program, or of the module itself.

Holds: the order of events. What happens stands in folders beside this one, which do not import it.
"""
