"""Accept TensorRT on a machine that has it: one command, one JSON to send back.

    make trt-acceptance [ONLY=t5,vit] [PRECISION=fp16,fp8] [QUICK=1]
    python benchmarks/trt_acceptance.py [--only t5,vit] [--precision fp16,fp8] [--routes onnx]
        [--quick] [--rounds 25] [--commit COMMIT] [--out FILE.json]

T5, UMT5, the two encoders of CLIP, ViT and Segformer with random weights, in four precisions and by
two routes: each engine is exported, verified on this GPU, looked at, and timed beside torch.compile
(max-autotune) and ONNX Runtime's CUDA provider on the same inputs, which stay on the GPU.  See
trt_rows.py and gpu_run.py for what a row holds; over_compiled and over_onnxruntime are times of
those over the row's own: above 1 is faster.

The file is written after every row.  Run it again with --only for what is missing: rows of the same
machine and commit are kept.  A missing library is exit code 3, and nothing is written.  --quick has
tiny sizes.  --dry-run has tiny sizes, ONNX Runtime and the CPU: it shows that the script works, and
nothing else.
"""

import argparse
import sys

import torch
from trt_models import DTYPES, subjects
from trt_rows import BUILDS, Build
from trt_run import opened, options_of, run_all, wanted

from enginecast.errors import MissingError
from enginecast.runtime.device.gpu import arch_of
from enginecast.runtime.sessions.tensorrt.library import import_tensorrt
from enginecast.runtime.sessions.tensorrt.versions import import_torch_tensorrt

NAME = "trt-acceptance"
INSTALL = ".venv/bin/python -m pip install '.[dev,tensorrt]'"


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 where an engine failed, 3 where a library is missing."""
    parser = options_of(__doc__)
    parser.add_argument("--routes", default="onnx,torch")
    options = parser.parse_args(arguments)
    builds = builds_of(options)
    if not options.dry_run:
        try:
            require_here(options.routes)
        except MissingError as error:
            print(f"{error.message}\n{error.hint}\nin this checkout: {INSTALL}", file=sys.stderr)
            return error.exit_code
    found = subjects(small=options.quick or options.dry_run)
    results = opened(NAME, builds[0].device, options)
    return run_all(found, builds, list(DTYPES), options, results)


def builds_of(options: argparse.Namespace) -> list[Build]:
    if options.dry_run:
        return [BUILDS["onnxruntime-cpu"]]
    routes = wanted(["onnx", "torch"], options.routes, "--routes")
    return [*(BUILDS[f"tensorrt-{route}"] for route in routes), BUILDS["onnxruntime-cuda"]]


def require_here(routes: str) -> None:
    """Refuse a machine that lacks something, before anything is written.

    Raises:
        MissingError: names the first that is missing.
    """
    trt = import_tensorrt("make trt-acceptance")
    arch_of(torch)
    if "torch" in routes:
        import_torch_tensorrt(
            "make trt-acceptance, route torch,",
            torch=torch.__version__,
            tensorrt=trt.__version__,
            cuda=torch.version.cuda,
        )


if __name__ == "__main__":
    sys.exit(main())
