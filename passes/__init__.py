if __name__ != "enginecast.passes":
    raise ImportError(
        "import enginecast.passes, not passes: the bare name is a second copy of every class"
    )
