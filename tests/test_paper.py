"""Every number of the paper is one that a tested page or command prints, and every reference is in its bibliography."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from places import ROOT

from flopcalc.core.estimate.published_conventions import load_quoted
from flopcalc.core.spec.coverage import load_coverage

PAPER = ROOT / "paper" / "paper.md"
# What the paper says, and where a test keeps the same number fresh.
CLAIMS = [
    ("13,583 traced steps, 466,193 rows", "docs/proof.md", "13583 traced steps, 466193 rows"),
    ("591 specs", "docs/proof.md", "591 specs"),
    ("miss 11.5 % of a Llama", "README.md", "| fvcore | the model, one run | forward | −11.5 % | −75.7 % |"),
    ("75.7 % of a Mixtral", "README.md", "| calflops | the model, one run | forward | −11.5 % | −75.7 % |"),
    ("misses 68.1 %", "README.md", "| DeepSpeed's profiler | the model, one run | forward | +0.02 % | −68.1 % |"),
    ("227 rows that others published: 207", "README.md", "| all | 227 | 207 |"),
    ("92 published runs", "README.md", "For 92 published runs"),
    ("6.1 %, and 88 % of the runs", "README.md", "6.1 % (72.5 % worst), and 88 % of the runs"),
    ("off by 29.3 %", "docs/prediction-accuracy.md", "2.0 % / 29.3 % / 24 of 26"),
    ("is 1.0 % and the worst 5.6 %", "docs/prediction-accuracy.md", "1.0 % / 5.6 % / 26 of 26"),
    ("There were ten rounds", "docs/prediction-accuracy.md", "Ten blind rounds followed"),
]


def read(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("claim", "page", "shown"), CLAIMS, ids=[claim for claim, _, _ in CLAIMS])
def test_a_number_is_that_of_its_page(claim: str, page: str, shown: str) -> None:
    assert claim in read(PAPER)
    assert shown in read(ROOT / page)


def test_numbers_of_the_data() -> None:
    assert len(load_quoted().conventions) == 12
    assert "twelve such conventions" in read(PAPER)
    coverage = load_coverage()
    counts = {mapping.auto_class: (mapping.supported, len(mapping.entries)) for mapping in coverage.mappings}
    assert counts["AutoModelForCausalLM"] == (183, 183)
    assert counts["AutoModelForImageTextToText"] == (93, 93)
    said = f"all 183 causal language model types and all 93 image-text types of {coverage.release}"
    assert said in read(PAPER)


def test_references_are_cited_and_listed() -> None:
    cited = set(re.findall(r"@([a-z]+\d*\w*)", PAPER.read_text(encoding="utf-8")))
    listed = set(
        re.findall(r"^@\w+\{(\w+),$", (ROOT / "paper" / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert cited == listed


def test_commands_name_files_that_exist() -> None:
    for name in re.findall(r"`python (\S+\.py)", PAPER.read_text(encoding="utf-8")):
        assert (ROOT / name).exists()


def test_sections_are_those_of_the_journal() -> None:
    sections = re.findall(
        r"^# (.+)$", re.sub(r"```.*?```", "", PAPER.read_text(encoding="utf-8"), flags=re.DOTALL), re.M
    )
    assert {"Summary", "Statement of need", "State of the field", "References"} <= set(sections)
    assert len(PAPER.read_text(encoding="utf-8").split()) < 1750  # JOSS's limit


@pytest.mark.skipif(shutil.which("pandoc") is None, reason="needs pandoc")
def test_it_compiles(tmp_path: Path) -> None:
    command = [
        "pandoc",
        "paper.md",
        "--citeproc",
        "--standalone",
        "--fail-if-warnings",
        "-o",
        str(tmp_path / "paper.html"),
    ]
    subprocess.run(command, cwd=PAPER.parent, check=True)
    page = (tmp_path / "paper.html").read_text(encoding="utf-8")
    assert "Calculon: A Methodology" in page
    assert "???" not in page
