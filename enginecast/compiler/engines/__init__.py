"""From a prepared program to engines that were run and judged.

Holds: the passes of an export, the lowering and first run of each engine, what it is judged by, and
what is done about one that is rejected. It publishes nothing.
"""
