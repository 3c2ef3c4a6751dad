"""What an export leaves on disk: a bundle with its manifest, or the reports of a rejection.

Holds: what is written, and in which order it becomes visible. It makes no engine.
"""
