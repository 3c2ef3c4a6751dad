"""State that a model keeps between calls, and random numbers it draws: an engine would lose both.

Holds: what finds such state, in a program or in Python, and what makes it harmless or refuses it.
"""
