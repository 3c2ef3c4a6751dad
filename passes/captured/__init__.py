"""Rewrites of every captured program, before any other pass sees it.

Holds: rewrites that keep every value, and need neither the model nor its weights.
"""
