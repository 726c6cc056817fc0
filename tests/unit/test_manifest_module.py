"""The module through Ansible's own argument parsing, on a temporary root."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.goodput.spark.plugins.modules import manifest as module


def run(capsys: pytest.CaptureFixture[str], check: bool = False, **arguments: Any) -> Any:
    with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def test_life_of_a_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").mkdir()
    common: dict[str, Any] = {"role": "demo", "root": str(tmp_path)}
    said = run(capsys, check=True, files=["/etc/x"], **common)
    assert said["changed"] and not (tmp_path / "var").exists()
    claimed = run(capsys, files=["/etc/x"], **common)
    assert claimed["changed"] and claimed["claimed"] == ["file /etc/x"]
    assert claimed["diff"]["before"] == "" and '"/etc/x"' in claimed["diff"]["after"]
    assert not run(capsys, files=["/etc/x"], **common)["changed"]
    (tmp_path / "etc/x").write_text("ours")
    assert run(capsys, state="recorded", **common)["recorded"] == ["/etc/x"]
    (tmp_path / "etc/x").chmod(0o600)
    drift = run(capsys, state="read", **common)
    assert not drift["changed"] and drift["drift"][0]["path"] == "/etc/x"
    absent = run(capsys, state="absent", **common)
    assert absent["changed"] and absent["removed"] == ["file /etc/x"] and absent["manifest"] is None
    assert list(tmp_path.rglob("*.json")) == []


def test_a_refusal_is_a_message_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(capsys, role="demo", files=["relative"], root=str(tmp_path))
    assert answer["failed"] and "found file 'relative'; required:" in answer["msg"]
    assert "exception" not in answer


def test_documentation_and_arguments_agree() -> None:
    import yaml

    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    spec = module.argument_spec()
    assert set(documented) == set(spec)
    for name, option in spec.items():
        for key in ("type", "elements", "default", "choices", "required"):
            assert documented[name].get(key) == option.get(key), (name, key)
