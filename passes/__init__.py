"""The passes: one file per pass, the registry, the presets, and nothing else at this level.

What they are made of is in `ir`, what they ask in `analyses`; `precision`, `quantize` and `lower`
are families. It knows no engine: it must not import `capture`, `exporters`, `runtime` or `verify`.
"""

if __name__ != "enginecast.passes":
    raise ImportError(
        "import enginecast.passes, not passes: the bare name is a second copy of every class"
    )
