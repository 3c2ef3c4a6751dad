if __name__ != "enginecast.exporters":
    raise ImportError(
        "import enginecast.exporters, not exporters: the bare name is a second copy of every class"
    )
