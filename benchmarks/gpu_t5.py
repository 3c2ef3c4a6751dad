"""T5 v1.1 encoders on a GPU: eager, torch.compile, torchao fp8, enginecast bf16 and fp8, ORT fp16.

    python benchmarks/gpu_t5.py [--only t5-xxl,8x512] [--engines NAME,NAME] [--budget-s 540]
                                [--cpu] [--out FILE.json]

Shapes of XXL, XL and base, batches of 1 and 8, 128 and 512 tokens; random weights in bf16, made on
the device.  See gpu_run.py for what a row holds.  XXL wants 64 GB of GPU memory, 32 GB of main
memory and 20 GB of disk for temporary files.

`--cpu` runs tiny shapes on the CPU, from end to end: it shows that the script works, and nothing
else.

On a machine that has torch 2.11 for CUDA, transformers, onnx, onnxscript, safetensors and a C++
compiler but no package index, take a checkout and the missing wheels along
(`pip download --no-deps -d wheels msgspec`, for that machine's Python), and there

    python -m pip install --no-index --no-deps --target site wheels/*.whl &&
    PYTHONPATH=.:site python benchmarks/gpu_t5.py --only t5-xxl,8x512 --budget-s 540 \\
        --commit COMMIT --out gpu-t5.json
"""

import sys

import torch
from gpu_models import T5, T5_SMALL, Shape, make_t5, texts
from gpu_run import Model, main, parser

SIZES = ((8, 512), (1, 128), (8, 128), (1, 512))
SMALL_SIZES = ((2, 16),)
NAME = "gpu-t5"


def models(*, small: bool) -> list[Model]:
    """The largest first."""
    device = "cpu" if small else "cuda"
    shapes, sizes = (T5_SMALL, SMALL_SIZES) if small else (T5, SIZES)

    def model(name: str, shape: Shape) -> Model:
        cases = tuple(texts(name, batch, tokens, device) for batch, tokens in sizes)
        return Model(name, lambda: make_t5(shape, device, torch.bfloat16), cases)

    return [model(name, shape) for name, shape in shapes.items()]


if __name__ == "__main__":
    options = parser(__doc__, NAME).parse_args()
    if options.cpu:
        torch.set_num_threads(1)
    sys.exit(main(NAME, options, models(small=options.cpu)))
