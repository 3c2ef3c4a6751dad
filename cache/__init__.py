if __name__ != "enginecast.cache":
    raise ImportError(
        "import enginecast.cache, not cache: the bare name is a second copy of every class"
    )
