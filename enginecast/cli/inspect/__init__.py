"""`enginecast inspect`: the plan of an export, shown without building it, or what a bundle holds.

Holds: pages. `enginecast.compiler.inspection` measures what they show.
"""
