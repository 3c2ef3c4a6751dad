"""Which outputs keep their values when the columns that the attention mask excludes are cut off.

Holds: a captured program, `proof.padding_of`. It imports `passes.ir`; it must not import passes.
"""
