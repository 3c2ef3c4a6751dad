"""Modules that try to mislead an export, and what became of each.

A class of defects is a file: `constants`, `writes`, `edges`, ... list their modules, `generated`
draws graphs.  `case` says what a case is, `cases` collects them, `judge` compares an engine with eager by
code that shares nothing with `enginecast.verification`, `plain` does the same to `torch.onnx.export`,
`examine` exports one case, `page` prints the table, `run` is the command (`make adversary`).
"""
