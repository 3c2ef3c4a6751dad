"""`enginecast inspect`: the plan of an export, shown without building it, or what a bundle holds.

Holds: pages and the measurements behind them. It imports `enginecast.compiler` and never runs an
engine.
"""
