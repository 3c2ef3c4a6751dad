"""The tokenizer of an enginecast bundle, for Triton's Python backend.

It makes the feeds that `enginecast run --prompts` makes: texts are cut at the longest that the
engine takes, and a request is padded to its own longest text.  It needs `tokenizers` and numpy in
the Python of the server.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # exists inside the server alone
from tokenizers import Encoding, Tokenizer


class TritonPythonModel:
    """What the Python backend makes one of for each instance."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the tokenizer beside this file, and the rules from `config.pbtxt`."""
        config = json.loads(args["model_config"])
        rules = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._padding_id = int(rules["padding_id"])
        self._pads_left = rules["padding_side"] == "left"
        self._least_tokens, self._step = int(rules["least_tokens"]), int(rules["step"])
        self._texts = int(rules["least_texts"]), int(rules["most_texts"])
        self._kinds = {
            output["name"]: rules[f"kind_of_{output['name']}"] for output in config["output"]
        }
        self._tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
        self._tokenizer.no_padding()  # the file may ask for its own padding and length
        side = (self._tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.enable_truncation(int(rules["longest"]), direction=side)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; one that is wrong gets its own error."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        values = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        try:
            texts = [value.decode() for value in values.reshape(-1)]
        except UnicodeDecodeError as error:
            return _refused(f"text: expected UTF-8: {error}")
        least, most = self._texts
        if not least <= len(texts) <= most:
            return _refused(f"text: expected {least}..{most} texts, got {len(texts)}")
        arrays = self._padded(self._tokenizer.encode_batch(texts))
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor(name, arrays[kind]) for name, kind in self._kinds.items()
            ]
        )

    def _padded(self, encodings: list[Encoding]) -> dict[str, Any]:
        width = max(self._least_tokens, *(len(one.ids) for one in encodings), 1)
        width += -width % self._step

        def rows(values: list[list[int]], filling: int) -> Any:
            padded = []
            for row in values:
                rest = [filling] * (width - len(row))
                padded.append([*rest, *row] if self._pads_left else [*row, *rest])
            return np.array(padded, dtype=np.int64)

        return {
            "token_ids": rows([one.ids for one in encodings], self._padding_id),
            "attention_mask": rows([[1] * len(one.ids) for one in encodings], 0),
            "token_type_ids": rows([one.type_ids for one in encodings], 0),
        }


def _refused(message: str) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message))
