"""ONNX Runtime's CUDA provider by way of the product: T5 and ViT in fp16 and bf16 on a GPU.

    python benchmarks/gpu_ort.py [--only t5,vit] [--precision fp16,bf16] [--quick] [--rounds 25]
                                 [--no-compile] [--commit COMMIT] [--dry-run] [--out FILE.json]

Each engine is exported, verified on the GPU (its verdict is in the row), loaded by the name of its
backend, so that another provider would be an error, and timed beside torch.compile on inputs and
outputs that stay on the GPU.  See trt_rows.py and gpu_run.py for what a row holds; over_compiled is
the time of torch.compile over the row's own: above 1 is faster.

gpu_t5.py and gpu_vit.py time the same program at more sizes, beside more peers, without a verdict.
`--dry-run` runs tiny shapes on the CPU: it shows that the script works, and nothing else.
"""

import sys

import onnxruntime
import torch
from trt_models import subjects
from trt_rows import BUILDS
from trt_run import opened, options_of, run_all

from enginecast.errors import MissingError
from enginecast.runtime.device.gpu import arch_of
from enginecast.runtime.sessions.onnxruntime import CUDA_PROVIDER

NAME = "gpu-ort"
MODELS = ("t5", "vit", "t5-tiny", "vit-tiny")


def main(arguments: list[str] | None = None) -> int:
    """1 where an engine failed, 3 where a library is missing."""
    options = options_of(__doc__).parse_args(arguments)
    build = BUILDS["onnxruntime-cpu" if options.dry_run else "onnxruntime-cuda"]
    if not options.dry_run:
        try:
            require_here()
        except MissingError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        onnxruntime.preload_dlls()
    small = options.quick or options.dry_run
    found = [one for one in subjects(small=small) if one.name in MODELS]
    results = opened(NAME, build.device, options)
    return run_all(found, [build], ["fp16", "bf16"], options, results)


def require_here() -> None:
    """Refuse a machine without a GPU or the build of ONNX Runtime for it.

    Raises:
        MissingError: names what is missing.
    """
    arch_of(torch)
    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        raise MissingError(
            f"needs onnxruntime-gpu: this ONNX Runtime has no {CUDA_PROVIDER}",
            hint="pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu>=1.28'",
        )


if __name__ == "__main__":
    sys.exit(main())
