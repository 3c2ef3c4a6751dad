"""Models that `generate` calls in turn: a step of a decoder, whose cache is inputs and outputs."""
