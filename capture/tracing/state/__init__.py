"""What a model keeps from call to call, and what it draws at random: an engine would lose both.

Enters: what finds such state, in a program or in Python, and what makes it harmless or refuses it.
"""
