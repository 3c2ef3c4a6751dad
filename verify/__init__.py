if __name__ != "enginecast.verify":
    raise ImportError(
        "import enginecast.verify, not verify: the bare name is a second copy of every class"
    )

import sys

from enginecast import CallableFolder

# `enginecast.verify(path)` is a verb of the API, and `enginecast.verify` the folder behind it.
sys.modules[__name__].__class__ = CallableFolder
