"""Text-encoder outputs, computed once and read without the encoder.

Its folders: `store`, `encoders`, `fill`, `read`, `upkeep`. It imports `runtime` and, of `capture`,
what opens a model; no compiler. The public names load on first use: reading alone never imports
torch.
"""

if __name__ != "enginecast.cache":
    raise ImportError(
        "import enginecast.cache, not cache: the bare name is a second copy of every class"
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecast.cache.read.cached_encoder import CachedEncoder as CachedEncoder
    from enginecast.cache.read.datasets import ShardShuffle as ShardShuffle
    from enginecast.cache.read.datasets import as_dataset as as_dataset
    from enginecast.cache.read.datasets import as_huggingface as as_huggingface
    from enginecast.cache.read.datasets import collate as collate
    from enginecast.cache.read.guard import require_frozen as require_frozen
    from enginecast.cache.read.reader import EmbeddingCache as EmbeddingCache
    from enginecast.cache.read.reader import open_cache as open_cache
    from enginecast.cache.read.text_variants import Variants as Variants

_WHERE = {
    "CachedEncoder": "read.cached_encoder",
    "EmbeddingCache": "read.reader",
    "ShardShuffle": "read.datasets",
    "Variants": "read.text_variants",
    "as_dataset": "read.datasets",
    "as_huggingface": "read.datasets",
    "collate": "read.datasets",
    "open_cache": "read.reader",
    "require_frozen": "read.guard",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'enginecast.cache' has no attribute {name!r}")
    return getattr(import_module(f"enginecast.cache.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
