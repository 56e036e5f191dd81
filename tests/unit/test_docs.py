"""What the documentation names is there: commands, keys, files, links, messages, and the rules of the workflow."""

import gzip
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from draftmill import __main__ as command_line
from draftmill import config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
BY_NAME = {page.name: page for page in PAGES}
GUIDES = [page for page in PAGES if page.name not in ("configuration.md", "CHANGELOG.md")]
RULE_FILES = [ROOT / "Snakefile", *sorted((ROOT / "workflow" / "rules").glob("*.smk"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CODE = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "workflow" / "scripts" / "draftmill").rglob("*.py"))
)

SLURM = "tests/slurm/test_slurm.py"
MAIN_JOB, LAWS = "tests/workflow/test_main_job.py", "tests/faults/test_laws.py"
# A command of the documentation, the test that runs it, and what in that test shows it. A make command counts
# as run where its recipe is (test_what_make_stands_for).
RUN = {
    "snakemake --cores 8 --resources gpu=8": (MAIN_JOB, '"--cores", "8", "--resources", "gpu=8"'),
    "snakemake -n": (MAIN_JOB, 'snakemake("-n")'),
    "snakemake results/prompts.json": (MAIN_JOB, 'snakemake("results/prompts.json")'),
    "snakemake results/generated/1-of-2.parquet": (MAIN_JOB, 'snakemake("results/generated/1-of-2.parquet")'),
    "snakemake results/merged.parquet": (MAIN_JOB, 'snakemake("results/merged.parquet")'),
    "make report": (MAIN_JOB, 'snakemake("--report", "report.html")'),
    "make resume": (MAIN_JOB, 'draftmill("resume"'),
    "make status": (MAIN_JOB, 'draftmill("status"'),
    "python -m draftmill resume --cores 8 --resources gpu=8": (LAWS, "start_resume("),
    "python -m draftmill status --json": (MAIN_JOB, 'draftmill("status", "--json")'),
    "python -m draftmill partial": (MAIN_JOB, 'draftmill("partial")'),
    "snakemake --profile profiles/slurm": (SLURM, 'project.on_slurm("--group-components'),
    "snakemake results/generated/1-of-2.parquet --profile profiles/slurm": (
        SLURM,
        'on_slurm("results/generated/2-of-4.parquet")',
    ),
    "snakemake tune --profile profiles/slurm": (SLURM, 'project.on_slurm("tune")'),
    "make docs": ("tests/unit/test_config.py", "config_docs"),
    "pytest tests/unit/test_capacity.py": ("tests/unit/test_capacity.py", "def test_the_measured_table"),
}
RUN_HERE = [
    "python -m draftmill check-prompts my-prompts.jsonl",
    "python -m draftmill capacity --model results/model --gpu H200 --output-tokens 3000",
    "python -m draftmill diagnose results/fleet/HOST/SLOT.telemetry.jsonl",
]
NOT_RUN = {
    "make setup-slurm": "it installs from a registry; make test-slurm does the same first",
    "snakemake": "tests run the same with --cores and --resources, and with targets and no flags",
    "make demo": "it installs from a registry; its recipe's commands are run by tests, the whole by hand",
    "make test": "it is what runs the tests",
    "make bench": "it takes 40 minutes of a machine at rest",
    "make lint": "run by .ci/run",
    "make types": "run by .ci/run",
    "make format": "it changes the files of the clone; .ci/run runs make format-check",
    "make lock": "it asks a package registry for what is newest",
    "source .venv/bin/activate": "tests run in an environment that is active already",
    "python -m draftmill status --watch": "it ends with Ctrl-C only; the same tables are tested without it",
    "snakemake tune": "tests/faults/test_tuner.py runs it, on stand-ins of two GPUs",
    "python3 tests/gpu/prove.py FOLDER tune fleet single early pair whole alone": "it needs GPUs",
    "snakemake --sdm conda": "conda is not at hand; a test compares its env files with the locks",
    "python3 -m venv .venv-gpu": "needs a GPU to be of use, and several GB",
    ".venv-gpu/bin/python -m pip install --no-deps -r requirements-sglang.lock": "the same",
}


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), flags=re.MULTILINE | re.DOTALL)


def bash_commands() -> list[tuple[str, str]]:
    """(page, command) of every line of every fenced bash block."""
    return [
        (page.name, line.strip())
        for page in PAGES
        for block in fenced(page, "bash")
        for line in block.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def spoken(page: Path) -> str:
    """All code of a page: what stands in backticks, and its fenced blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text(page), flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*re.findall(r"`([^`\n]+)`", prose(page)), *blocks])


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"\bmake ([a-z-]+)", spoken(page)):
            assert target in targets, f"{page.name}: make {target}"


def test_every_command_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"python -m draftmill ([a-z-]+)", spoken(page)):
            assert name in command_line.COMMANDS, f"{page.name}: {name}"
    documented = "\n".join(spoken(page) for page in GUIDES)
    missing = [name for name in command_line.COMMANDS if not re.search(rf"\b{name}\b", documented)]
    assert set(missing) <= {"summary"}, missing  # it closes make demo


def test_every_option_of_a_command_exists() -> None:
    for _, line in bash_commands():
        if not line.startswith("python -m draftmill ") or " resume " in line:
            continue
        name = line.split()[3]
        module = command_line.COMMANDS[name][0]
        source = text(ROOT / "workflow" / "scripts" / "draftmill" / f"{module}.py")
        for option in re.findall(r"--[a-z-]+", line):
            assert f'"{option}"' in source, line


def test_every_config_key_exists() -> None:
    known = {path for path, _ in config.paths()}
    blocks = {path for path in known if "." not in path}
    for page in PAGES:
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`", prose(page)):
            if name.split(".")[0] in blocks and not re.search(
                r"\.(json|md|py|parquet|jsonl|html|yaml|lock)$", name
            ):
                assert name in known, f"{page.name}: {name}"


def test_examples_of_the_config_are_valid() -> None:
    for page in PAGES:
        for block in fenced(page, "yaml"):
            config.resolve(yaml.safe_load(block), page.name)


def test_every_named_file_exists() -> None:
    made = re.compile(r"^(results|\.venv|\.snakemake|path|PATH)\b|^\.venv|^/|my-|-test\.jsonl")
    outputs = "\n".join(text(path) for path in RULE_FILES) + CODE + MAKEFILE
    names = r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]*\w/?|[\w-]+\.(?:md|py|yaml|lock|toml|cff|parquet|json|jsonl|html))(?![\w*…])"
    for page in PAGES:
        for span in re.findall(r"`([^`\n]+)`", prose(page)):
            if "…" in span or "://" in span or " " in span.strip():
                continue
            for name in re.findall(names, span):
                if made.search(name) or (ROOT / name).exists() or (DOCS / name).exists():
                    continue
                last = name.rstrip("/").rsplit("/", 1)[-1]
                assert last in outputs, f"{page.name}: {name}"


def test_every_result_that_is_named_is_written() -> None:
    written = "\n".join(text(path) for path in RULE_FILES) + CODE
    for page in GUIDES:
        for name in re.findall(r"results/([a-z_]+)(?=[/.`])", text(page)):
            assert re.search(rf"results/{name}\b|\"{name}\"|'{name}'", written), (
                f"{page.name}: results/{name}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", prose(found), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name}: {target}"


def test_the_graph_names_exactly_the_rules() -> None:
    rules = {
        name
        for path in RULE_FILES
        for name in re.findall(r"^(?:rule|checkpoint) (\w+):", text(path), flags=re.MULTILINE)
    }
    (graph,) = fenced(ROOT / "README.md", "mermaid")
    edges = set(re.findall(r"^\s*(\w+) -\.?->\s*(\w+)$", graph, flags=re.MULTILINE))
    assert {name for edge in edges for name in edge} == rules
    assert len(edges) == len(graph.strip().splitlines()) - 1


def test_the_graphs_edges_are_those_of_the_rules() -> None:
    """An edge for each rule whose output another names, by its `rules.` name or by its file."""
    bodies = {
        name: body
        for path in RULE_FILES
        for name, body in re.findall(
            r"^rule (\w+):\n((?:(?:    .*)?\n)+)", text(path) + "\n", flags=re.MULTILINE
        )
    }
    files = {
        "generate": "results/generated/",
        "shard_prompts": "results/shards/",
        "launch_server": "results/leases/",
    }
    wanted = set()
    for name, body in bodies.items():
        inputs = re.search(r"^    input:\n((?:        .*\n)+)", body, flags=re.MULTILINE)
        for other in bodies:
            named = inputs and (f"rules.{other}." in inputs[1] or files.get(other, "\0") in inputs[1])
            if named and other != name:
                wanted.add((other, name))
    (graph,) = fenced(ROOT / "README.md", "mermaid")
    assert set(re.findall(r"(\w+) -\.?->\s*(\w+)", graph)) == wanted


def test_every_fenced_command_is_run_or_excused() -> None:
    listed = [*RUN, *RUN_HERE, *NOT_RUN]
    assert len(listed) == len(set(listed))
    assert {line for _, line in bash_commands()} == set(listed)
    assert all(NOT_RUN.values())


@pytest.mark.parametrize("command", RUN_HERE)
def test_commands_that_need_no_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = ROOT / "tests" / "recordings"
    shape = json.loads((recordings / "qwen3.6-27b-shape.config.json").read_text(encoding="utf-8"))
    model, slot = tmp_path / "results" / "model", tmp_path / "results" / "fleet" / "HOST"
    model.mkdir(parents=True)
    slot.mkdir(parents=True)
    (model / "model.json").write_text(json.dumps({"config": shape}), encoding="utf-8")
    samples = gzip.decompress((recordings / "extra.metrics.jsonl.gz").read_bytes())
    (slot / "SLOT.telemetry.jsonl").write_bytes(samples)
    (tmp_path / "my-prompts.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert command_line.main(shlex.split(command)[3:]) == 0


def test_what_make_stands_for() -> None:
    for target, words in {
        "report": "snakemake --report report.html",
        "resume": "python -m draftmill resume",
        "status": "python -m draftmill status",
        "docs": "python -m draftmill.config_docs",
        "demo": "snakemake --cores 8 --resources gpu=8",
    }.items():
        assert re.search(rf"^{target}:.*\n\t@{re.escape(words)}$", MAKEFILE, flags=re.MULTILINE), target


@pytest.mark.parametrize("command", RUN)
def test_the_test_that_runs_a_command_does(command: str) -> None:
    test, sign = RUN[command]
    assert sign in text(ROOT / test), f"{command}: {test} no longer holds {sign}"


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    """Each piece of a quoted message stands in the code (f-strings broken over lines are joined first)."""
    sources = CODE + MAKEFILE
    joined = re.sub(r"\"\s*\n\s*f?\"", "", sources)
    foreign = {
        "No module named draftmill",
        "dictionary update sequence element #1 has length 1",
        "Directory cannot be locked",
    }
    rows = re.findall(
        r"^\| `([^|]+?)`(?: \([^|]*\))? \|", text(BY_NAME["troubleshooting.md"]), flags=re.MULTILINE
    )
    assert len(rows) > 40
    for message in rows:
        if message in foreign:
            continue
        for piece in message.split("…"):
            fixed = piece.strip(" ;:,()")
            assert fixed in joined, f"{message!r}: {fixed!r} is in no message"


def test_pages_name_no_host_and_no_path_of_a_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/work/|/tmp/|/root|/home/|pypi\.org|https?://(?!127\.0\.0\.1)", text(page)), (
            page.name
        )


def test_the_picture_is_small() -> None:
    picture = DOCS / "images" / "report.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 200_000
