"""A published bundle compared with eager again, and its reference computed anew from the model.

Holds: what `enginecast verify` does. No export imports it.
"""
