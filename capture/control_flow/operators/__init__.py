"""The functions that converted code calls instead of `if`, `while`, `for`, `and` and `assert`.

Holds: operators that decide at run time whether they stay Python or become cond, while_loop or
scan. It imports `enginecast.errors` and no other folder of ours.
"""
