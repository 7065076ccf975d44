"""A fixed slice of the fault campaign: one fault of every kind, against real processes.

``make faults`` runs thousands of them; a failure here is repeated alone with ``-k KIND``.
"""

from collections.abc import Iterator

import pytest
from campaigns.faults.campaign import Campaign
from campaigns.faults.kinds import KINDS
from campaigns.faults.known import make_versions

SEED = 20
ORDER = sorted(KINDS, key=lambda name: KINDS[name].weight, reverse=True)
"""Kinds in the order of the run: those that end an engine come last."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    campaign = Campaign(make_versions(tmp_path_factory.mktemp("versions")), seed=SEED)
    yield campaign
    campaign.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ORDER)
def test_the_engine_keeps_its_promises_through(campaign: Campaign, name: str) -> None:
    outcome = campaign.one(ORDER.index(name), name)
    assert not outcome.problems, outcome
