"""Write the tables of the two READMEs that come from measurements: other tools, and published numbers.

python docs/make_readme.py            write them, and copy the code blocks of English pages into the Chinese ones
python docs/make_readme.py --check    exit 1 if one is stale
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import quoted_rows  # noqa: E402

# English page -> the Chinese one, which has the same code blocks and numbers.
PAIRS = {
    ROOT / "README.md": ROOT / "README.zh-CN.md",
    ROOT / "docs" / "tutorial.md": ROOT / "docs" / "tutorial.zh-CN.md",
}
FENCE = re.compile(r"^```[^\n]*\n.*?^```$", re.MULTILINE | re.DOTALL)
FAMILIES = ("llama", "mixtral", "qwen2_5_vl")
TOOLS = {"fvcore": "fvcore", "calflops": "calflops", "deepspeed": "DeepSpeed's profiler", "torchinfo": "torchinfo"}
WORDS: dict[str, dict[str, str]] = {
    "README.md": {
        "head": "| tool | needs | counts | Llama | Mixtral | Qwen2.5-VL |",
        "ours": "a config",
        "ours counts": "forward, backward, recomputation",
        "counter": "the model, one run",
        "forward": "forward",
        "formula": "its own config",
        "formula counts": "training",
        "memory": "the model's config",
        "memory counts": "bytes of weights and Adam, no FLOPs",
        "fails": "fails",
        "published": "| published by | rows | explained within 0.5 % | median difference |",
        "all": "all",
    },
    "README.zh-CN.md": {
        "head": "| 工具 | 需要 | 统计内容 | Llama | Mixtral | Qwen2.5-VL |",
        "ours": "一份 config",
        "ours counts": "前向、反向、重计算",
        "counter": "真实模型，运行一次",
        "forward": "前向",
        "formula": "框架自己的 config",
        "formula counts": "训练",
        "memory": "模型的 config",
        "memory counts": "权重和 Adam 的字节数，不算 FLOPs",
        "fails": "报错",
        "published": "| 发布者 | 行数 | 0.5 % 以内对上 | 差异中位数 |",
        "all": "合计",
    },
}


def load_peers() -> dict[str, Any]:
    return dict(json.loads((BENCHMARKS / "results" / "peers.json").read_text(encoding="utf-8")))


def format_percent(value: float) -> str:
    if value == 0:
        return "0 %"
    text = f"{value:+.1f}" if abs(value) >= 0.05 else f"{value:+.2f}"
    return f"{text.removesuffix('.0').replace('-', '−')} %"


def make_peers(words: dict[str, str]) -> list[str]:
    """Forward counts with HF's default attention, and formulas of training, as percent off the operator counter."""
    rows = [row for row in load_peers()["rows"] if row["attention"] == "sdpa"]
    truth = {row["model"]: row["counted"] for row in rows if row["tool"] == "operator counter"}
    ours = {row["model"]: row["flopcalc"] for row in rows}
    counted = {(row["tool"], row["model"]): row["counted"] for row in rows}

    def compare(value: int | None, family: str) -> str:
        return words["fails"] if value is None else format_percent(100 * (value / truth[family] - 1))

    lines = [words["head"], "|---|---|---|---|---|---|"]
    cells = [compare(ours[family], family) for family in FAMILIES]
    lines.append(f"| **flopcalc** | {words['ours']} | {words['ours counts']} | {' | '.join(cells)} |")
    for tool, name in TOOLS.items():
        cells = [compare(counted[tool, family], family) for family in FAMILIES]
        lines.append(f"| {name} | {words['counter']} | {words['forward']} | {' | '.join(cells)} |")
    formulas = tomllib.loads((BENCHMARKS / "data" / "peer_formulas.toml").read_text(encoding="utf-8"))
    for each in formulas.values():
        cells = [format_percent(each[family]) for family in FAMILIES]
        lines.append(f"| {each['name']} | {words['formula']} | {words['formula counts']} | {' | '.join(cells)} |")
    lines.append(f"| accelerate estimate-memory | {words['memory']} | {words['memory counts']} | – | – | – |")
    return lines


def make_published(words: dict[str, str]) -> list[str]:
    """Rows of docs/published.md, by the project that printed them."""
    found = defaultdict(list)
    for each in quoted_rows.explain_all():
        found[quoted_rows.find_source(each.row)["repository"]].append(each)
    everything = [each for group in found.values() for each in group]
    lines = [words["published"], "|---|---|---|---|"]
    for name, group in (*sorted(found.items(), key=lambda item: -len(item[1])), (words["all"], everything)):
        explained = sum(each.state != "unexplained" for each in group)
        off = median(
            abs(each.difference if each.variant_difference is None else each.variant_difference) for each in group
        )
        lines.append(f"| {name} | {len(group)} | {explained} | {100 * off:.2f} % |")
    return lines


def fill(page: str, text: str) -> str:
    """The page with its tables made anew."""
    for name, make in (("tools", make_peers), ("published", make_published)):
        begin, end = f"<!-- {name}: python docs/make_readme.py -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{page} has no place for the table {name!r}: {begin.strip()} … {end}")
        text = before + begin + "\n" + "\n".join(make(WORDS[page])) + "\n\n" + end + after
    return text


def copy_blocks(english: str, chinese: str) -> str:
    """The Chinese page with the English page's code blocks, in their order."""
    blocks = FENCE.findall(english)
    if len(blocks) != len(FENCE.findall(chinese)):
        raise ValueError(f"the English page has {len(blocks)} code blocks, the Chinese {len(FENCE.findall(chinese))}")
    following = iter(blocks)
    return FENCE.sub(lambda _: next(following), chinese)


def make_all() -> dict[Path, str]:
    """Every page that is written here, as it should be."""
    made: dict[Path, str] = {}
    for english, chinese in PAIRS.items():
        texts = {path: path.read_text(encoding="utf-8") for path in (english, chinese)}
        for path, text in texts.items():
            made[path] = fill(path.name, text) if path.name in WORDS else text
        made[chinese] = copy_blocks(made[english], made[chinese])
    return made


if __name__ == "__main__":
    pages = make_all()
    stale = [path for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        if stale:
            print(f"stale: {', '.join(path.name for path in stale)}; run python docs/make_readme.py", file=sys.stderr)
            sys.exit(1)
    else:
        for path in stale:
            path.write_text(pages[path], encoding="utf-8")
