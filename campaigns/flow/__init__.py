"""Models with control flow through the whole export, and what became of each.

`cases` lists them, `hf_models` makes the small transformers models among them, `examine` exports
one and compares the published bundle with eager on its own terms, `page` keeps the results and
writes the tables of docs/results/control-flow.md, `run` is the command (`make control-flow`).
"""
