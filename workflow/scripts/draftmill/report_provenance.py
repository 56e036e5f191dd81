"""The report's pages on where the dataset comes from: hashes, versions, servers, and the resolved config.

Knows what another run would need to be the same, and what must not be told. Secrets are blacked out here.
"""

import json
import re
from collections.abc import Mapping
from importlib import metadata
from platform import python_version

import yaml

from draftmill import __version__, pages
from draftmill.records import number, optional, text
from draftmill.report_run import (
    Page,
    Run,
    engine_of,
    flags_of,
    in_words,
    known,
    tables,
)
from draftmill.statistics import duration

PACKAGES = ("snakemake", "polars", "pyarrow", "tokenizers", "jinja2", "requests")


def provenance(run: Run) -> Page:
    """Hashes, versions, servers, parts."""
    model = run.model
    names = (
        "name",
        "path",
        "identity",
        "kind",
        "revision",
        "context_length",
        "template_hash",
        "tokenizer_hash",
    )
    body = [
        pages.heading("Model"),
        pages.facts(
            (in_words(name), redact_text(text(model, name))) for name in names if model.get(name) is not None
        ),
        pages.heading("Sampling"),
        pages.facts(
            (name, json.dumps(value, ensure_ascii=False)) for name, value in sorted(run.sampling.items())
        ),
        pages.heading("Servers"),
    ]
    rows = [
        (
            text(server, "server"),
            engine_of(server) or "unknown",
            text(server, "gpu_name") or "CPU",
            known(optional(server, "effective_capacity")),
            redact_text(flags_of(server)),
        )
        for server in run.servers
    ]
    body.append(pages.table(("server", "engine", "device", "capacity", "flags"), rows, numbers=False))
    parts = [
        (text(part, "from"), text(part, "to"), duration(number(part, "wall_s")))
        for part in tables(run.rates.get("parts"))
    ]
    body += [
        pages.heading("Parts of the run"),
        pages.table(("from", "to", "time at work"), parts, numbers=False),
    ]
    left_out = [
        (text(part, "from"), text(part, "to"), text(part, "why"))
        for part in tables(run.rates.get("left_out"))
    ]
    if left_out:
        body += [pages.heading("Left out"), pages.table(("from", "to", "why"), left_out, numbers=False)]
    versions = [("draftmill", __version__), ("python", python_version())]
    versions += [(name, _version(name)) for name in PACKAGES]
    body += [pages.heading("Versions"), pages.facts(versions)]
    return (
        f"Seed {run.config.get('seed')}; {text(run.rates, 'started_at')} to {text(run.rates, 'ended_at')}.",
        body,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


SECRET = re.compile(r"api_?key|secret|password|passwd|credential|(^|_)(auth_?)?token$", re.IGNORECASE)
SECRET_FLAG = re.compile(r"(--[\w-]*(?:api-key|auth-token|hf-token|secret|password)[\w-]*[= ]+)\S+")
USERINFO = re.compile(r"(\w://)[^/@\s]+@")
BLACK = "█████"


def redact_text(value: str) -> str:
    """The same without passwords in URLs and without values of secret flags."""
    return USERINFO.sub(rf"\1{BLACK}@", SECRET_FLAG.sub(rf"\1{BLACK}", value))


def redact(value: object, name: str = "") -> object:
    """A config without its secrets: values under secret names and all environment values are blacked out."""
    if isinstance(value, Mapping):
        inside = "secret" if name == "env" else ""
        return {str(key): redact(item, inside or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str):
        return BLACK if SECRET.search(name) and value else redact_text(value)
    return value


def config(run: Run) -> Page:
    """The resolved config as YAML."""
    dumped = yaml.safe_dump(redact(run.config), sort_keys=False, allow_unicode=True, width=96)
    return "Every key with the value that was used.", [pages.code(dumped)]
