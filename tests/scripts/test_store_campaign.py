"""Three of the campaign's faults, and the errors for a store that lost a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import store_campaign
from scripts.campaign import CampaignError
from scripts.s3_server import BUCKET, KEY, SECRET, Store
from scripts.store_campaign import StoredRun

pytestmark = [pytest.mark.usefixtures("warm_starts"), pytest.mark.long]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    pytest.importorskip("boto3")
    store = Store(tmp_path / "store", None, KEY, SECRET)
    store.start(seed=0)
    yield store
    store.close()


@pytest.mark.promise("kill-upload")
@pytest.mark.timeout(280)
def test_no_checkpoint_is_lost(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = ("the relay", "all ranks and the disk", "one rank")
    monkeypatch.setattr(store_campaign, "FAULTS", faults)
    found = store_campaign.disturb(tmp_path, store, rounds=3, rng=random.Random(3))
    assert all(f"1 x {fault}" in found for fault in faults)


def test_a_lost_or_damaged_checkpoint_is_found(store: Store, tmp_path: Path) -> None:
    run = StoredRun(folder=tmp_path / "run", store=store)
    store_campaign.finish(run, steps=4)
    assert run.uploaded == run.saved == {2, 4}
    assert run.check() == 2
    files = store.client.list_objects_v2(Bucket=BUCKET, Prefix="run/step-2/")["Contents"]
    key = next(file["Key"] for file in files if file["Key"].endswith(".distcp"))
    content = store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    store.client.put_object(Bucket=BUCKET, Key=key, Body=b"x" + content[1:])
    with pytest.raises(CampaignError, match="step 2 "):
        run.check()
    store.client.delete_object(Bucket=BUCKET, Key="run/step-2/manifest.json")
    with pytest.raises(CampaignError, match=r"step 2 .*\[4\]"):
        run.check()
    run.uploaded.add(6)
    with pytest.raises(CampaignError, match=r"step 6 .*\[\]"):
        run.note()
