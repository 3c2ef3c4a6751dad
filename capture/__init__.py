if __name__ != "enginecast.capture":
    raise ImportError(
        "import enginecast.capture, not capture: the bare name is a second copy of every class"
    )
