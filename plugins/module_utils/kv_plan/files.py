# Apache-2.0 (see LICENSE)
"""Read profiles, models and node facts. The only part of the planner that touches files; it runs on the controller.

pydantic checks types and unknown keys against the dataclasses of ``profile``; without pydantic installed there is one
error saying so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from .checks import GIB, PlanInputError, nearest, number
from .geometry import geometry_from_config
from .profile import L2Filesystem, Model, Node, Profile

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ROOT / "profiles"
MODELS = ROOT / "models"
RELEASES = ROOT / "vars/releases"
MAX_CONFIG_BYTES = 16 * 2**20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeys(_LOADER):  # type: ignore[misc]
    """YAML that refuses a key given twice."""


def _unique_mapping(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        try:
            double = key in result
        except TypeError:
            raise PlanInputError(str(key_node.start_mark.name), key, "keys are text", "correct the file") from None
        if double:
            raise PlanInputError(
                str(key_node.start_mark.name),
                key,
                f"this key stands twice (line {key_node.start_mark.line + 1})",
                "remove one of them",
            )
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _read(path: Path, limit: int = MAX_CONFIG_BYTES) -> str:
    try:
        if path.stat().st_size > limit:
            raise PlanInputError(
                str(path), path.stat().st_size, f"larger than {limit} bytes", "this is not a configuration file"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanInputError(
            str(path), type(error).__name__, "must be a readable text file", "check path and permissions"
        ) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; duplicate keys and anything else are refused."""
    text = _read(path)
    try:
        data = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise PlanInputError(str(path), "no YAML" + where, "must be a YAML mapping", "correct the file") from None
    if not isinstance(data, dict):
        raise PlanInputError(str(path), type(data).__name__, "must be a YAML mapping", "correct the file")
    return data


def names_in(directory: Path) -> list[str]:
    """Names that can be given instead of a path; ``_name`` is only there to be inherited."""
    return sorted(path.stem for path in directory.glob("*.yml") if not path.stem.startswith("_"))


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``override`` over ``base``, section by section; lists and values are replaced."""
    result = dict(base)
    for key, value in override.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def profile_data(name: str, directory: Path = PROFILES, _seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The merged mapping of a profile and of those it inherits from."""
    if name in _seen:
        raise PlanInputError(
            "inherits",
            " -> ".join((*_seen, name)),
            "profiles inherit in one direction",
            "remove one of these inherits lines",
        )
    path = Path(name) if name.endswith((".yml", ".yaml")) else directory / f"{name}.yml"
    if not path.is_file():
        raise PlanInputError("profile", name, "must be a profile or a .yml file", nearest(name, names_in(directory)))
    data = read_yaml(path)
    parent = data.pop("inherits", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise PlanInputError(f"{path.name}: inherits", parent, "must be the name of one profile", "name one")
        data = merge(profile_data(parent, directory, (*_seen, name)), data)
    data["name"] = path.stem
    return data


@lru_cache(maxsize=1)
def _adapter() -> Any:
    try:
        from pydantic import ConfigDict, TypeAdapter
    except ImportError:
        raise PlanInputError(
            "pydantic",
            "not installed",
            "profiles are checked with pydantic 2 on the controller",
            "pip install 'pydantic>=2.11'",
        ) from None
    for section in _sections(Profile):
        section.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    return TypeAdapter(Profile)


def _sections(cls: type) -> Iterable[type]:
    """A dataclass and those of its fields, recursively."""
    import dataclasses
    import typing

    yield cls
    for hint in typing.get_type_hints(cls).values():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _sections(hint)


def known_keys(path: Iterable[Any] = ()) -> list[str]:
    """Keys of the section at ``path`` of a profile."""
    import dataclasses
    import typing

    cls: Any = Profile
    for part in path:
        cls = typing.get_type_hints(cls).get(part)
        if not dataclasses.is_dataclass(cls):
            return []
    return [item.name for item in dataclasses.fields(cls)]


def profile_from(data: Mapping[str, Any]) -> Profile:
    """A checked profile from a mapping; one error naming key, rule and remedy."""
    from pydantic import ValidationError

    adapter = _adapter()
    name = str(data.get("name", "profile"))
    try:
        text = json.dumps(dict(data))
    except (TypeError, ValueError) as error:
        raise PlanInputError(
            name, str(error), "a profile holds text, numbers, lists and mappings", "correct the value"
        ) from None
    try:
        profile: Profile = adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = [part for part in first["loc"] if part not in ("int", "float", "literal['auto']", "str")]
        key = ".".join(str(part) for part in where)
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, PlanInputError):
            raise PlanInputError(f"{name}: {cause.name}", cause.value, cause.rule, cause.remedy) from None
        if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            raise PlanInputError(
                f"{name}: {key}", first["input"], "unknown key", nearest(str(where[-1]), known_keys(where[:-1]))
            ) from None
        options = {item["msg"] for item in error.errors() if item["loc"][: len(where)] == tuple(where)}
        rule = " or ".join(sorted(message.replace("Input should be ", "must be ") for message in options))
        raise PlanInputError(
            f"{name}: {key}", first["input"], rule, "give a plain value; the unit is in the name"
        ) from None
    return profile


def load_profile(name: str, overrides: Mapping[str, Any] | None = None, directory: Path = PROFILES) -> Profile:
    """A profile by name or path; ``overrides`` maps dotted keys (``lmcache.l1.size_gib``) to values."""
    return profile_from(_overridden(profile_data(name, directory), overrides))


def load_profile_or_mapping(profile: Any, overrides: Mapping[str, Any] | None = None) -> Profile:
    """As ``load_profile``, or from a mapping that may name a profile under ``inherits``."""
    return profile_from(stated(profile, overrides))


def stated(profile: Any, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a profile (as ``load_profile_or_mapping`` takes it) and the overrides say, without any default."""
    if isinstance(profile, str):
        return _overridden(profile_data(profile), overrides)
    if not isinstance(profile, Mapping):
        raise PlanInputError("profile", profile, "must be a name, a path or a mapping", nearest("", names_in(PROFILES)))
    data = {str(key): value for key, value in profile.items()}
    parent = data.pop("inherits", None)
    if parent is not None:
        data = merge(profile_data(str(parent)) | {"name": "inline"}, data)
    data.setdefault("name", "inline")
    return _overridden(data, overrides)


def release_versions(name: str, directory: Path = RELEASES) -> dict[str, str]:
    """The versions of serving software that a release set states, by their keys in a profile (``versions.lmcache``)."""
    if name not in names_in(directory):
        raise PlanInputError(
            "goodput_release", name, "must be a file in vars/releases", nearest(str(name), names_in(directory))
        )
    release = read_yaml(directory / f"{name}.yml")["goodput_release_set"]
    return {f"versions.{key}": str(release[key]) for key in ("vllm", "lmcache", "dynamo") if key in release}


def _overridden(data: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    for dotted, value in (overrides or {}).items():
        if not isinstance(dotted, str) or not all(dotted.split(".")):
            raise PlanInputError(
                "override", dotted, "must be a dotted key such as lmcache.l1.size_gib", "correct the key"
            )
        data = merge(data, _nested(dotted.split("."), value))
    return data


def _nested(parts: list[str], value: Any) -> dict[str, Any]:
    return {parts[0]: _nested(parts[1:], value) if len(parts) > 1 else value}


def _json(path: Path) -> Any:
    text = _read(path)

    def no_constant(word: str) -> Any:
        raise PlanInputError(str(path), word, "is no JSON number", "use the model's own config.json")

    try:
        return json.loads(text, parse_constant=no_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise PlanInputError(str(path), where, "must be complete JSON", "copy the model's config.json again") from None


def load_model(name: str, directory: Path = MODELS) -> Model:
    """A model by name (``models/NAME.yml``) or by its directory with ``config.json`` and weights."""
    path = directory / f"{name}.yml"
    if "/" not in name and path.is_file():
        data = read_yaml(path)
        unknown = sorted(set(data) - {"config", "weights_bytes", "directory", "source", "description"})
        if unknown:
            raise PlanInputError(
                str(path.name),
                unknown[0],
                "unknown key",
                nearest(unknown[0], ("config", "weights_bytes", "directory", "source")),
            )
        geometry = geometry_from_config(data.get("config"), name, path.name)
        return Model(geometry, data.get("weights_bytes"), str(data.get("directory", name)), str(data.get("source", "")))
    folder = Path(name)
    if not folder.is_dir():
        raise PlanInputError(
            "model", name, "must be a name in models/ or the directory of a model", nearest(name, names_in(directory))
        )
    config = folder / "config.json"
    geometry = geometry_from_config(_json(config), folder.resolve().name or "model", str(config))
    weights = sum(
        item.stat().st_size for item in folder.iterdir() if item.suffix in _WEIGHT_SUFFIXES and item.is_file()
    )
    return Model(geometry, weights or None, folder.resolve().name, str(config))


#: What ``goodput.spark.node_facts`` returns under ``memory`` beside what is used here.
_UNUSED_FACTS = ("swap_free_bytes", "cma_total_bytes", "cma_free_bytes", "free_2mib_blocks", "swappiness")


def node_from(facts: Any, default_name: str = "node") -> Node:
    """A node from ``name``, ``server`` and what ``goodput.spark.node_facts`` returns under ``memory`` (bytes)."""
    if not isinstance(facts, Mapping):
        raise PlanInputError(
            default_name, facts, "must be a mapping of memory facts", "run goodput.spark.node_facts first"
        )
    name = str(facts.get("name", default_name))
    known = ("total_bytes", "available_bytes", "server", "cuda_free_bytes")
    accepted = (*known, "name", "swap_bytes", "swap_total_bytes", "l2_filesystem", *_UNUSED_FACTS)
    for key in facts:
        if key not in accepted:
            raise PlanInputError(f"{name}: {key}", facts[key], "unknown fact", nearest(str(key), accepted))
    if not facts.get("total_bytes"):
        raise PlanInputError(
            f"{name}: total_bytes",
            facts.get("total_bytes"),
            "MemTotal of the node is needed",
            "run goodput.spark.node_facts first",
        )
    disk = facts.get("l2_filesystem")
    if disk is not None and not isinstance(disk, L2Filesystem):
        if not isinstance(disk, Mapping) or not {"mount", "size_bytes"} <= set(disk) <= {
            "mount",
            "size_bytes",
            "residue_bytes",
        }:
            raise PlanInputError(
                f"{name}: l2_filesystem",
                disk,
                "must have mount, size_bytes and residue_bytes",
                "give the filesystem's facts",
            )
        disk = L2Filesystem(**disk)
    values = {key: facts[key] for key in known if key in facts}
    if not isinstance(values.get("server", False), bool):
        raise PlanInputError(f"{name}: server", values["server"], "must be true or false", "use the bool filter")
    swap = facts.get("swap_bytes", facts.get("swap_total_bytes", 0))
    return Node(name=name, swap_bytes=swap, l2_filesystem=disk, **values)


def nodes_from_gib(totals_gib: Iterable[float]) -> list[Node]:
    """Nodes of which only MemTotal is known, the first one being the server."""
    nodes = []
    for index, gib in enumerate(totals_gib, 1):
        total = number(f"memory of node {index}", gib, 0.25, 16384, "GiB")
        nodes.append(Node(name=f"node{index}", total_bytes=int(total * GIB), server=index == 1))
    return nodes
