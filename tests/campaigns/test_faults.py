"""A few faults of every campaign; `make faults` injects all of them."""

from pathlib import Path

import pytest
from faults.campaign import Campaign, Sizes, Tally, require
from faults.campaigns import CAMPAIGNS
from slow_cases import some_slow

QUICK = [campaign for campaign in CAMPAIGNS if campaign.sizes.quick]


@pytest.mark.parametrize(
    "campaign",
    some_slow(
        QUICK,
        ["full disks", "kills of exports", "kills of cache writers", "caches on network disks"],
        lambda campaign: campaign.name,
    ),
)
def test_faults_do_no_harm(campaign: Campaign, tmp_path: Path) -> None:
    if lacks := campaign.lacks():
        pytest.skip(lacks)
    tally = campaign.run(campaign.sizes.quick, tmp_path)
    print(f"{campaign.name}: {tally.injected} injected, {dict(tally.outcomes)}")
    require(campaign, tally, campaign.sizes.quick)


def test_harm_and_faults_that_do_not_fire_are_failures() -> None:
    campaign = Campaign("none", "Nothing holds.", Sizes(1, 1), lambda count, folder: Tally())
    silent, harmful = Tally(), Tally()
    silent.add("passed", fired=False)
    harmful.defect("half a bundle")
    for tally, message in ((Tally(), "0 of 1 inj"), (silent, "0 of 1 fired"), (harmful, "half")):
        with pytest.raises(AssertionError, match=message):
            require(campaign, tally, 1)
