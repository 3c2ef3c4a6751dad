"""Loading and running the engines of a bundle.

Its folders: `bundle`, `sessions`, `device`, `values`. It imports `enginecast.errors` alone, and no
torch until an engine that needs it is opened.
"""

if __name__ != "enginecast.runtime":
    raise ImportError(
        "import enginecast.runtime, not runtime: the bare name is a second copy of every class"
    )
