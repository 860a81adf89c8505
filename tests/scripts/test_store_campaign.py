"""Three of the campaign's faults, and what it says of a store that did lose a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import store_campaign
from scripts.crash_campaign import CampaignError
from scripts.s3_server import BUCKET, SECRET, Store
from scripts.store_campaign import Run

pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    pytest.importorskip("boto3")
    store = Store(tmp_path / "store", None, "AKIAIOSFODNN7EXAMPLE", SECRET)
    store.start(seed=0)
    yield store
    store.close()


@pytest.mark.timeout(280)
@pytest.mark.long
def test_nothing_is_lost(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = ("the wire", "all ranks and the disk", "one rank")
    monkeypatch.setattr(store_campaign, "FAULTS", faults)
    said = store_campaign.campaign(tmp_path, store, rounds=3, rng=random.Random(3))
    assert said.startswith("3 faults (1 x the wire, 1 x all ranks and the disk, 1 x one rank)")
    assert said.endswith("equal")


@pytest.mark.long
def test_what_is_lost_or_damaged_is_found(store: Store, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", store)
    store_campaign.finish(run, steps=4)
    assert run.uploaded == run.saved == {2, 4}
    assert run.check() == 2
    files = store.client.list_objects_v2(Bucket=BUCKET, Prefix="run/step-2/")["Contents"]
    key = next(file["Key"] for file in files if file["Key"].endswith(".distcp"))
    content = store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    store.client.put_object(Bucket=BUCKET, Key=key, Body=b"x" + content[1:])
    with pytest.raises(CampaignError, match="step 2 of the store: "):
        run.check()
    store.client.delete_object(Bucket=BUCKET, Key="run/step-2/manifest.json")
    with pytest.raises(CampaignError, match=r"step 2 was reported as uploaded; found \[4\]"):
        run.check()
    run.uploaded.add(6)
    with pytest.raises(CampaignError, match=r"step 6 was there, the life went on from \[\]"):
        run.note()
