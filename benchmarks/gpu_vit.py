"""Image encoders on a GPU, beside the peers of gpu_t5.py: ViT-L and the backbone of Sapiens-0.3B.

    python benchmarks/gpu_vit.py [--only sapiens-0.3b,1x1024x768] [--engines NAME,NAME]
                                 [--budget-s 540] [--cpu] [--out FILE.json]

Images of 1024x768 in patches of 16, batches of 1 and 8; random weights in bf16, made on the device.
See gpu_run.py for what a row holds, and gpu_t5.py for a machine without a package index.
"""

import sys

import torch
from gpu_models import VIT, VIT_SMALL, Shape, images, make_vit
from gpu_run import Model, main, parser

SIZE, PATCH, BATCHES = (1024, 768), 16, (8, 1)
SMALL_SIZE, SMALL_PATCH, SMALL_BATCHES = (32, 48), 8, (2,)
NAME = "gpu-vit"


def models(*, small: bool) -> list[Model]:
    device = "cpu" if small else "cuda"
    shapes = VIT_SMALL if small else VIT
    size, patch, batches = (
        (SMALL_SIZE, SMALL_PATCH, SMALL_BATCHES) if small else (SIZE, PATCH, BATCHES)
    )
    patches = (size[0] // patch) * (size[1] // patch)

    def model(name: str, shape: Shape) -> Model:
        rows = patches + (not name.startswith("sapiens"))  # and the class token
        cases = tuple(images(name, batch, size, rows, device) for batch in batches)
        return Model(
            name, lambda: make_vit(name, shape, size, patch, device, torch.bfloat16), cases
        )

    return [model(name, shape) for name, shape in shapes.items()]


if __name__ == "__main__":
    options = parser(__doc__, NAME).parse_args()
    if options.cpu:
        torch.set_num_threads(1)
    sys.exit(main(NAME, options, models(small=options.cpu)))
