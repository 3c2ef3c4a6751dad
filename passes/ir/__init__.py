"""The building blocks of passes: the base class, sites, pipelines, edits, patterns, traits, text.

Enters: what any pass may need and no pass in particular. It imports `ops`; it must not import
passes or analyses.
"""
