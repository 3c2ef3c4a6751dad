"""OpenVINO, in an environment of its own: run torch.onnx's file once for each line that comes.

    python openvino.py FOLDER fp32|int8

FOLDER has `plain/model.onnx` and `inputs.safetensors`, and gets the output.  int8 is NNCF's
compression of the weights, with activations quantized as OpenVINO does by default.  Prints the
version when it is ready, and then the CPU seconds of each run.
"""

import sys
import time
from pathlib import Path

sys.path.pop(0)  # this file has the name of the package

import openvino
from safetensors.numpy import load_file, save_file

folder, precision = Path(sys.argv[1]), sys.argv[2]
core = openvino.Core()
settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
model = core.read_model(folder / "plain" / "model.onnx")
if precision == "int8":
    import nncf

    model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
request = core.compile_model(model, "CPU", settings).create_infer_request()
feeds = load_file(folder / "inputs.safetensors")
found = request.infer(feeds)
save_file(
    {"output": next(iter(found.values())).copy()}, folder / f"openvino-{precision}.safetensors"
)
print("ready", openvino.__version__, flush=True)
for _ in sys.stdin:
    start = time.process_time()
    request.infer(feeds)
    print(time.process_time() - start, flush=True)
