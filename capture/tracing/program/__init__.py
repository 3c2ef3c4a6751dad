"""Rewrites of a program that was captured, before any pass sees it.

Enters: rewrites that keep every value, and need neither model nor weights.
"""
