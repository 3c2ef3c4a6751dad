"""The building blocks of passes: the base class, sites, pipelines, edits, patterns, traits, text.

Holds: tools for any pass. It imports `ops`; it must not import passes or analyses.
"""
