"""Analyses that passes run on a program; they change nothing.

Holds: analyses, whichever pass uses them. It imports `passes.ir` and `ops`; it must not
import passes.
"""
