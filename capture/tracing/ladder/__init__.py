"""The ladder of tracing strategies, and a single torch.export trace at the sizes it accepts.

Holds: the order of strategies, and what a trace does whatever its strategy. It must not import
`checks`, which look at a trace that was made.
"""
