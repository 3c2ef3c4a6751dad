"""How much precision each value needs: how `unify-dtype` classifies values, and its graph walk.

Holds: what concerns dtypes of floats. It imports `passes.ir` and `passes.analyses`.
"""
