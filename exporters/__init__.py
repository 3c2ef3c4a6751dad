"""From a rewritten program to the files of an engine: one folder per target.

Holds: targets. It imports `passes` and `runtime`, whose reader owns the bundle format; it must not
run an engine, nor import `capture` or `verify`.
"""

if __name__ != "enginecast.exporters":
    raise ImportError(
        "import enginecast.exporters, not exporters: the bare name is a second copy of every class"
    )
