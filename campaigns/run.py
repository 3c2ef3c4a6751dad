"""The command of the campaigns: examine what is chosen, keep the rows, write the page.

    python campaigns/run.py CAMPAIGN [--only bert,t5] [--match REGEX] [--jobs 2] [--keep DIR]

The campaigns are zoo, vision, fp16, diffusion, operators, flow, adversary, faults, trt_gate and
trt_models.
"""

import os
import sys
from pathlib import Path

# Before torch is loaded: the children share the cores, and nothing is fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root / place) for place in ("campaigns", "tests/support")]
    from harness import main

    sys.exit(main())
