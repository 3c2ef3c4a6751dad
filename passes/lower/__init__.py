"""Lowering passes that several targets share; they end a target's pipeline.

Holds: rewrites into what targets take. What one target alone needs stands in that target's folder.
They import `passes.ir` and `ops`.
"""
