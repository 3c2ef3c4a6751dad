"""OpenVINO, in an environment of its own: run an ONNX file once for each line that comes.

    python openvino.py MODEL.onnx INPUTS.safetensors OUTPUTS.safetensors

Prints its version when it is ready, and then the CPU seconds of each run.
"""

import sys
import time

sys.path.pop(0)  # this file has the name of the package

import openvino
from safetensors.numpy import load_file, save_file

model, inputs, outputs = sys.argv[1:]
core = openvino.Core()
settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
request = core.compile_model(core.read_model(model), "CPU", settings).create_infer_request()
feeds = load_file(inputs)
found = request.infer(feeds)
save_file({"output": next(iter(found.values())).copy()}, outputs)
print(openvino.__version__, flush=True)
for _ in sys.stdin:
    start = time.process_time()
    request.infer(feeds)
    print(time.process_time() - start, flush=True)
