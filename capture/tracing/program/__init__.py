"""Rewrites of a captured program, before any pass sees it.

Enters: rewrites that keep every value, and need neither model nor weights.
"""
