"""Every base architecture of the installed transformers, tiny and random, through the pipeline.

`shrink` rewrites a config, `tiny` builds a model from it, `examine` exports it and says how that
ended, `judge` compares the published bundle with eager on its own terms, `run` does it for all.
"""
