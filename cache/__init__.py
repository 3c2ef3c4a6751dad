"""Text-encoder outputs, computed once and read without the encoder.

The public names load on first use: reading alone never imports torch.
"""

if __name__ != "enginecast.cache":
    raise ImportError(
        "import enginecast.cache, not cache: the bare name is a second copy of every class"
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecast.cache.cached_encoder import CachedEncoder as CachedEncoder
    from enginecast.cache.guard import require_frozen as require_frozen
    from enginecast.cache.huggingface_reading import as_huggingface as as_huggingface
    from enginecast.cache.reader import EmbeddingCache as EmbeddingCache
    from enginecast.cache.reader import open_cache as open_cache
    from enginecast.cache.text_variants import Variants as Variants
    from enginecast.cache.text_variants import variants as variants
    from enginecast.cache.torch_reading import ShardShuffle as ShardShuffle
    from enginecast.cache.torch_reading import as_dataset as as_dataset
    from enginecast.cache.torch_reading import collate as collate

_WHERE = {
    "CachedEncoder": "cached_encoder",
    "EmbeddingCache": "reader",
    "ShardShuffle": "torch_reading",
    "Variants": "text_variants",
    "as_dataset": "torch_reading",
    "as_huggingface": "huggingface_reading",
    "collate": "torch_reading",
    "open_cache": "reader",
    "require_frozen": "guard",
    "variants": "text_variants",
}
__all__ = [
    "CachedEncoder",
    "EmbeddingCache",
    "ShardShuffle",
    "Variants",
    "as_dataset",
    "as_huggingface",
    "collate",
    "open_cache",
    "require_frozen",
    "variants",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'enginecast.cache' has no attribute {name!r}")
    return getattr(import_module(f"enginecast.cache.{_WHERE[name]}"), name)
