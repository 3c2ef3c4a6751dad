"""Which outputs do not change when columns that the attention mask leaves out are cut off.

Enters: a captured program, `proof.padding_of`. It imports `passes.ir`; it must not import passes.
"""
