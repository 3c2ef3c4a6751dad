"""How much precision each value needs: what `unify-dtype` decides by, and its walk.

Enters: what concerns dtypes of floats. It imports `passes.ir` and `passes.analyses`.
"""
