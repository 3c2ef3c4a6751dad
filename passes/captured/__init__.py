"""The passes of every capture (see `passes.presets`): they keep every value."""
