"""Shrink a program on which a pass fails to a few nodes, and write them as a script of its own.

Holds: delta debugging over a graph, and the script that rebuilds what is left. It judges by
`enginecast.testing`, as the script does.
"""
