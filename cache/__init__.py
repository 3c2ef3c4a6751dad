"""Text-encoder outputs, computed once and read without the encoder.

Its folders: `store`, `encoders`, `fill`, `read`, `upkeep`. It imports `runtime` and, of `capture`,
what opens a model; no compiler. The public names load on first use: reading alone never imports
torch.
"""

if __name__ != "enginecast.cache":
    raise ImportError(
        "import enginecast.cache, not cache: the bare name is a second copy of every class"
    )

from typing import TYPE_CHECKING

from enginecast.public import importing, listing

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

_READ = "enginecast.cache.read"
_WHERE = {
    "CachedEncoder": f"{_READ}.cached_encoder:CachedEncoder",
    "EmbeddingCache": f"{_READ}.reader:EmbeddingCache",
    "ShardShuffle": f"{_READ}.datasets:ShardShuffle",
    "Variants": f"{_READ}.text_variants:Variants",
    "as_dataset": f"{_READ}.datasets:as_dataset",
    "as_huggingface": f"{_READ}.datasets:as_huggingface",
    "collate": f"{_READ}.datasets:collate",
    "open_cache": f"{_READ}.reader:open_cache",
    "require_frozen": f"{_READ}.guard:require_frozen",
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
]
__dir__ = listing(__all__)
if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _WHERE)
