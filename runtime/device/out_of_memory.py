"""Tell out-of-memory errors from other errors: each library words them differently."""

_WORDS = (
    "out of memory",  # CUDA, torch.OutOfMemoryError
    "can't allocate memory",  # torch on the CPU
    "not enough memory",  # torch on the CPU
    "failed to allocate memory",  # ONNX Runtime's arena
    "bad allocation",  # C++
    "bad_alloc",
)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error of torch, ONNX Runtime, numpy or Python means too little memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _WORDS)
