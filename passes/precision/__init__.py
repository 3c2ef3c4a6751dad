"""How much precision each value needs: how `unify-dtype` classifies values, and its graph walk.

Enters: what concerns dtypes of floats. It imports `passes.ir` and `passes.analyses`.
"""
