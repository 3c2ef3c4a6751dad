if __name__ != "enginecast.verify":
    raise ImportError(
        "import enginecast.verify, not verify: the bare name is a second copy of every class"
    )
