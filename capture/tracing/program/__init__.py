"""Rewrites of a captured program, before any pass sees it.

Holds: rewrites that keep every value, and need neither model nor weights.
"""
