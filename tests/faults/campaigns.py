"""All campaigns, in the order of the page."""

from faults import damage, hostile, manifests, publishing, running
from faults.campaign import Campaign

CAMPAIGNS: tuple[Campaign, ...] = (
    *damage.CAMPAIGNS,
    *hostile.CAMPAIGNS,
    *manifests.CAMPAIGNS,
    *publishing.CAMPAIGNS,
    *running.CAMPAIGNS,
)
