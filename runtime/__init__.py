if __name__ != "enginecast.runtime":
    raise ImportError(
        "import enginecast.runtime, not runtime: the bare name is a second copy of every class"
    )
