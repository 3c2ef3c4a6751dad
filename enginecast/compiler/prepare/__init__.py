"""From a MODEL argument to a captured program, the cases that it is verified on, and the reference.

Holds: the first steps of export, inspect and opt. It makes no engine.
"""
