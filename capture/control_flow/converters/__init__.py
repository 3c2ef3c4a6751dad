"""Rewrite the syntax trees of a model's functions: control flow becomes calls to `operators`.

Holds: converters, one for each kind of statement or expression. They know no types and run
nothing.
"""
