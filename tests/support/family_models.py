"""One tiny model of each family that users export, saved as they have it on disk.

The sizes make what is particular of a family happen: windows are smaller than the sequence, key
and value heads are fewer than query heads, distances pass the last relative bucket.
"""

from family_text import decoder_families, text_families
from family_vision import vision_families

FAMILIES = [*text_families(), *decoder_families(), *vision_families()]
