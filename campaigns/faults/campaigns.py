"""All campaigns, in the order of the page."""

from faults import (
    cache_kills,
    caching,
    damage,
    exporting,
    hostile,
    manifests,
    publishing,
    running,
    signatures,
)
from faults.campaign import Campaign

CAMPAIGNS: tuple[Campaign, ...] = (
    *damage.CAMPAIGNS,
    *hostile.CAMPAIGNS,
    *manifests.CAMPAIGNS,
    *signatures.CAMPAIGNS,
    *publishing.CAMPAIGNS,
    *exporting.CAMPAIGNS,
    *running.CAMPAIGNS,
    *cache_kills.CAMPAIGNS,
    *caching.CAMPAIGNS,
)
