"""What a site measured, and what the planner gets of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.filter.kv_plan import kv_plan
from ansible_collections.goodput.spark.plugins.filter.site_plan import plan_nodes, plan_overrides
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files, planner, site
from plays import ROOT, run_playbook

GIB = 2**30


def measured(total_gib: int) -> dict[str, Any]:
    return {"node": {"memory_at_rest": {"total_bytes": total_gib * GIB, "swap_total_bytes": 0}}}


def test_every_measured_node_is_planned_for_and_the_first_is_the_server() -> None:
    hostvars = {"a": {"goodput_measured": measured(119)}, "b": {"goodput_measured": measured(121)}}
    assert plan_nodes(hostvars, ["a", "b"], "b") == [
        {"name": "a", "server": False, "total_bytes": 119 * GIB, "swap_total_bytes": 0},
        {"name": "b", "server": True, "total_bytes": 121 * GIB, "swap_total_bytes": 0},
    ]


def test_a_node_outside_the_play_counts_if_it_answered() -> None:
    others = {"results": [{"item": "b", **measured(112)}, {"item": "c", "state": "unreachable"}]}
    hostvars: dict[str, Any] = {"a": {"goodput_measured": measured(119), "goodput_measured_others": others}, "b": {}}
    assert [node["name"] for node in plan_nodes(hostvars, ["a", "b", "c"], "a")] == ["a", "b"]


def test_without_a_measurement_the_way_to_get_one_is_named() -> None:
    with pytest.raises(AnsibleFilterError, match=r"playbooks/plan\.yml"):
        plan_nodes({"a": {}}, ["a"], "a")


def test_the_summary_names_sizes_nodes_and_warnings() -> None:
    nodes = [files.node_from(item) for item in plan_nodes({"a": {"goodput_measured": measured(120)}}, ["a"], "a")]
    plan = planner.make_plan(files.load_profile("super-kv12-l18"), files.load_model("super"), nodes)
    first, *rest = site.summary(plan)
    assert "a 120.0 GiB" in first and "block 4224 tokens" in first and "L1 8.0 GiB" in first
    assert [line.split()[0] for line in rest] == [item["rule"] for item in plan["warnings"]] != []


STORE = [
    {"name": "nemotron-3-super-120b-nvfp4", "revision": "0123abc", "source": "/data/super"},
    {"name": "tiny", "revision": "50c565dcb69b", "source": "/data/tiny"},
]
RELEASES = files.names_in(files.RELEASES)


def site_plan(
    profile: Any = "super-recommended",
    store: Any = STORE,
    release: str = "current",
    chosen: dict[str, Any] | None = None,
    model: str = "",
) -> dict[str, Any]:
    """As vars/site.yml makes it."""
    nodes = [{"name": "a", "server": True, "total_bytes": 119 * GIB}]
    overrides = plan_overrides(chosen or {}, profile, model, store, release)
    return kv_plan(profile, model, nodes, overrides, fail=False)


def test_new_weights_in_the_same_folder_get_another_l2_directory() -> None:
    plans = [site_plan(store=[STORE[0] | {"revision": revision}]) for revision in ("0123abc", "4567def")]
    assert [plan["l2_path"].rpartition("/")[2].partition("_")[0] for plan in plans] == [
        "super@0123abc",
        "super@4567def",
    ]
    assert [plan["inputs"]["profile"]["model_revision"] for plan in plans] == ["0123abc", "4567def"]


def test_a_model_that_the_store_does_not_hold_has_no_revision() -> None:
    assert "/super_kv-" in site_plan(store=[STORE[1]])["l2_path"]


def test_a_revision_is_one_plain_word_of_a_path() -> None:
    path = site_plan(store=[STORE[0] | {"revision": "refs/pr 7; $x"}])["l2_path"]
    assert path.rpartition("/")[2].startswith("super@refs-pr-7---x_kv-fp8_")


def test_a_directory_of_a_model_is_known_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(files.read_yaml(files.MODELS / "tiny.yml")["config"]))
    (folder / "model.safetensors").write_bytes(b"x")
    plan = site_plan("virtual", release="virtual", model=str(folder))
    assert plan["model_name"] == "tiny" and "/tiny@50c565dcb69b_" in plan["l2_path"]


def test_the_virtual_pairs_directory_is_the_same_in_every_run() -> None:
    names = {str(site_plan("virtual", release=release)["l2_path"]) for release in ("virtual", "virtual", "current")}
    assert names == {"/srv/goodput/l2/tiny@50c565dcb69b_kv-bfloat16_c256_fused_mocker-0.28.0_lmcache-0.5.6"}


def test_what_the_profile_does_not_say_is_what_is_installed() -> None:
    profile = {"inherits": "_nano", "model": "super", "serving": {"kv_cache_bytes": 10**10}}
    bare = files.stated(profile) | {"versions": {}}
    versions = site_plan(bare, release="article")["inputs"]["profile"]["versions"]
    assert (versions["vllm"], versions["lmcache"], versions["dynamo"]) == ("0.23.0", "0.5.2", "1.3.0")


def test_a_profile_for_other_versions_is_refused_with_the_release_set_that_has_them() -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        site_plan("super-kv12-l18")
    text = str(caught.value)
    for part in (
        "profile super-kv12-l18: found 'vllm 0.23.0, dynamo 1.3.0, lmcache 0.5.2'",
        "goodput_release current installs: vllm 0.28.0, dynamo 1.5.1, lmcache 0.5.6",
        "set goodput_release: article",
        "goodput_profile_set: {versions.vllm: 0.28.0, versions.dynamo: 1.5.1, versions.lmcache: 0.5.6}",
    ):
        assert part in text
    # Each remedy, taken at its word.
    assert site_plan("super-kv12-l18", release="article")["l2_path"].endswith("_vllm-0.23.0_lmcache-0.5.2")
    remedy = yaml.safe_load(text.partition("goodput_profile_set: ")[2])
    assert site_plan("super-kv12-l18", chosen=remedy)["l2_path"].endswith("_vllm-0.28.0_lmcache-0.5.6")


def test_values_of_the_site_do_not_claim_what_is_not_installed() -> None:
    for chosen in ({"versions.lmcache": "0.5.7"}, {"versions": {"lmcache": "0.5.7"}}):
        with pytest.raises(AnsibleFilterError, match=r"found 'lmcache 0\.5\.7'.*goodput_release: one in vars/releases"):
            site_plan(chosen=chosen)
    with pytest.raises(AnsibleFilterError, match="model_revision: found 'old'; must be that of nemotron.*0123abc"):
        site_plan(chosen={"model_revision": "old"})
    assert "/super@mine_" in site_plan(chosen={"model_revision": "mine"}, store=[])["l2_path"]
    with pytest.raises(AnsibleFilterError, match="goodput_release: found 'curent'.*did you mean 'current'"):
        site_plan(release="curent")


@pytest.mark.parametrize("name", files.names_in(files.PROFILES))
def test_every_profile_runs_on_a_release_set_of_ours(name: str) -> None:
    def runs(release: str) -> bool:
        try:
            site_plan(name, release=release)
        except AnsibleFilterError:
            return False
        return True

    assert any(map(runs, RELEASES))
    # What is chosen unless a site says otherwise.
    defaults = yaml.safe_load((ROOT / "group_vars/all/00-site.yml").read_text())
    assert runs(defaults["goodput_release"]) or name != defaults["goodput_profile"]


def test_the_site_plans_with_its_revision_and_its_release_set(tmp_path: Path) -> None:
    """vars/site.yml itself."""
    choices = yaml.safe_load((ROOT / "group_vars/all/00-site.yml").read_text())
    choices |= {"goodput_profile": "super-recommended", "model_store_models": STORE, "ansible_connection": "local"}
    other = {"goodput_release": "article", "goodput_measured": measured(119)}
    hosts = {"a": {"goodput_measured": measured(119)}, "b": other}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": hosts, "vars": choices}}))
    play = {"hosts": "a", "gather_facts": False, "vars_files": [str(ROOT / "vars/site.yml")]}
    show = {"ansible.builtin.debug": {"msg": "{{ goodput_plan.l2_path }}"}}
    (tmp_path / "play.yml").write_text(
        yaml.safe_dump([play | {"tasks": [show]}, play | {"hosts": "b", "tasks": [show]}])
    )
    done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml")
    assert "/super@0123abc_kv-fp8_" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2 and "set goodput_release: current" in done.stdout + done.stderr


def test_ports_are_known_before_there_is_a_plan() -> None:
    usual = {"frontend_http": 8000, "worker_system": 9091, "lmcache_request": 5555, "lmcache_http": 9500}
    found = site.ports_of_site("virtual", {"ports.frontend_http": 8100})
    assert found.items() >= (usual | {"frontend_http": 8100}).items() and "others" not in found
    # What is wrong with this one is said elsewhere.
    assert site.ports_of_site("no-such-profile", {}).items() >= usual.items()
