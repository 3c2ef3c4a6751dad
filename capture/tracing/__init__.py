"""Tracing a model with torch.export: the ladder of strategies, and what binds weights to a trace.

Enters: tracing strategies, and checks of a trace. It imports `passes.ir` and no pass; only
`enginecast` and `enginecast.compiler` import it.
"""
