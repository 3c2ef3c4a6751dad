"""The sizes that a program takes: those that its trace kept, and those at which eager differs."""
