"""A damaged model file, and another runtime archive, on one node."""

from __future__ import annotations

import pytest
from conftest import Pair

NODE = "spark2"
MODEL = "/srv/goodput/models/tiny/config.json"


@pytest.mark.fault("model corrupted")
def test_a_model_file_damaged_on_one_node(pair: Pair) -> None:
    # Same size, one byte changed.
    pair.sh(NODE, f"printf X | dd of={MODEL} bs=1 seek=10 conv=notrunc status=none")
    outcome, failures = pair.verify("model_store")
    assert outcome.rc == 1
    assert any(
        f["node"] == NODE and "config.json" in str(f) and "sha256" in str(f) and f["remedy"] for f in failures
    ), failures
    pair.role("model_store").succeeded()
    pair.verify("model_store")[0].succeeded()


@pytest.mark.fault("runtime differs")
def test_another_runtime_archive_on_one_node(pair: Pair) -> None:
    pair.sh(NODE, "head -c 65536 /dev/zero >/run/other.squashfs")
    try:
        # As a host would see it whose medium carries another file.
        pair.role("runtime", "preflight", "--limit", NODE, runtime_node_archive="/run/other.squashfs").failed_with(
            NODE, "sha256", "/run/other.squashfs", "required"
        )
    finally:
        pair.sh(NODE, "rm -f /run/other.squashfs")
    pair.verify("runtime")[0].succeeded()
