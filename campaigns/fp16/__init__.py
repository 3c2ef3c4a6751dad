"""fp16 of models whose values leave its range, as those of trained ones do.

`examine` plants loud channels into a tiny model, converts it plainly, and exports it; `run` does so
for all, and `page` writes the table.
"""
