"""Faults put into enginecast on purpose: failing system calls, kills, damage, hostile input, load.

Each module holds the faults of one area as campaigns (`campaign.Campaign`).  `test_faults.py` runs
a few of each with the tests; `make faults` runs all, and writes docs/how-it-works/reliability.md.
"""
