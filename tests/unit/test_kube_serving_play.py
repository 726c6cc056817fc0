"""The role kube_serving on clean hosts: the playbook's own variables render, and a dry run goes through."""

from __future__ import annotations

from pathlib import Path

import yaml
from plays import run_playbook
from test_kube_site import answer

ROOT = Path(__file__).resolve().parents[2]


def test_a_dry_run_on_clean_hosts_passes(tmp_path: Path) -> None:
    memory = {"total_bytes": 121 << 30, "available_bytes": 115 << 30, "swap_total_bytes": 0}
    hosts = {
        f"spark{n}": {
            "goodput_rails": answer(n, addressed=False),
            "goodput_measured": {"node": {"memory_at_rest": memory}},
            "goodput_management_address": f"10.0.0.{n}",
        }
        for n in (1, 2)
    }
    variables = {
        "ansible_connection": "local",
        "ansible_become": False,
        "rdma_rail_subnets": ["192.168.100.0/24", "192.168.101.0/24"],
    }
    variables |= {"goodput_kube_choices": {"digests": {"runtime": f"sha256:{'1' * 64}"}}}
    # A port that is ours alone, so that whatever runs on this machine is no finding.
    variables |= {"kube_serving_ports": [{"port": 47113, "purpose": "a test"}]}
    shared = yaml.safe_load((ROOT / "group_vars/all/00-site.yml").read_text()) | {
        "goodput_profile": "super-recommended"
    }
    inventory = {"sparks": {"hosts": hosts, "vars": shared | variables}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    play = yaml.safe_load((ROOT / "playbooks/kube_serving.yml").read_text())[-1]
    play["vars_files"] = [str(ROOT / "vars/site.yml"), str(ROOT / "vars/releases/current.yml")]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml", "--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.count("failed=0") == 2 and "End the workers if others will come" in done.stdout
