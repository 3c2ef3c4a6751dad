"""Whole diffusion pipelines: exported, checked and run, engines in the place of their components.

Holds: what knows how pipelines use their components. It exports them through `compiler`, and runs
engines through `runtime`.
"""
