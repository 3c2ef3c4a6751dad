"""From a MODEL argument to a program of torch.export, with inputs and named outputs.

Its folders: `sources`, `inputs`, `outputs`, `control_flow`, `tracing`, `torchscript`. It knows
neither passes beyond the IR, nor targets.
"""

if __name__ != "enginecast.capture":
    raise ImportError(
        "import enginecast.capture, not capture: the bare name is a second copy of every class"
    )
