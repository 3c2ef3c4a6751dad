"""Each operator of torch's own database through an export, and what became of it.

`samples` makes modules of an operator's sample inputs, `examine` exports and judges them, `page`
keeps the results and writes docs/results/operators.md, `run` is the command (`make operators`).
"""
