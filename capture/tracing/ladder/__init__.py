"""The ladder of tracing strategies, and one trace by torch.export in the sizes that it takes.

Enters: the order of strategies, and what a trace does whatever its strategy. It must not import
`checks`, which look at a trace that was made.
"""
