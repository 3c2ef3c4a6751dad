"""Pipelines of diffusers: engines in the place of their components.

Enters: what knows how pipelines use their components. It runs engines through `runtime`, and
imports `compiler` for exports.
"""
