"""The pages about speed, made from results files: docs/speed.md, bench/results/README.md, README.

docs/speed.md has a section for each workload and machine: the newest rows, at a few sizes, beside
the best peer. bench/results/README.md has every row of every file bench/results/cpu-<machine>-
<date>.json and gpu-<machine>-<date>.json; a name may go on, -<date>-dense.json.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe_science.bench.paged import USUAL_PAGE
from flashmoe_science.bench.results import RESTED, SUSTAINED, Row, geometric_mean, headline
from speed_picture import Panel, draw

RESULT_FILE = re.compile(
    r"(?P<kind>cpu|gpu)-(?P<machine>.+?)-(?P<date>\d{4}-\d{2}-\d{2})(-.+)?\.json"
)
NONE = "\N{EN DASH}"
PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
PEERS = {
    "flash": "FlashAttention-2",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "nondeterministic": "ours, not deterministic",
    "without_bias": "ours without the bias",
    "rounded_bias": "ours, bias in 16 bits",
    "mask_as_bias": "ours, the mask as a bias",
    "without_dropout": "ours without dropout",
    "contiguous": "ours without pages",
    "sixteen_bits": "ours, cache in 16 bits",
    "apart": "ours in two calls",
    "decodes": "the decodes alone",
    "chunk": "the chunk alone",
    "copy": "a plain copy",
    "index_copy": "PyTorch index_copy",
    "efficient": "PyTorch efficient",
    "flex": "FlexAttention",
    "varlen": "varlen_attn",
    "loop": "a loop over experts",
    "grouped_mm": "PyTorch grouped_mm",
    "transformers_batched": "transformers, batched",
}
# On a CPU "flash" is another thing than on a GPU.
CPU_PEERS = {"flash": "PyTorch flash", "math": "PyTorch math"}
CROWDED = 6  # rows of a pass, from which on head dims and masks have lines of their own


def markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True)
class ResultsFile:
    """A file, and those of its rows that say in which regime they were measured."""

    path: Path
    results: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> ResultsFile:
        results = json.loads(path.read_text())
        for row in results["rows"]:
            row.setdefault("regime", regime_before(results))
        return cls(path, results, [row for row in results["rows"] if row["regime"]])

    @property
    def about(self) -> dict[str, Any]:
        return self.results["about"]

    @property
    def machine(self) -> str:
        if self.about.get("device") == "cuda":
            return self.about["gpu"]["name"]
        threads = self.about["threads"]
        return f"{self.about['cpu']['name']}, {threads} thread{'s' if threads != 1 else ''}"

    @property
    def provenance(self) -> str:
        about = self.about
        commit = (about["commit"] or "unknown")[:10] + (" with changes" if about["dirty"] else "")
        text = f"{about['date'][:10]}, commit {commit}, torch {about['versions']['torch']}"
        # Files from before there were turns: peers, ours, ours, peers.
        return text + ("" if "turns" in self.results else ", the better of two rounds")


def regime_before(results: dict[str, Any]) -> str | None:
    """Of files from before rows said so. A GPU that neither rested nor was kept busy has none."""
    if results["about"].get("device") != "cuda":
        return SUSTAINED
    return RESTED if results.get("rest_s") else None


def read_files(folder: Path) -> list[ResultsFile]:
    """Every results file, by name."""
    names = sorted(path for path in folder.glob("*.json") if RESULT_FILE.fullmatch(path.name))
    return [ResultsFile.read(path) for path in names]


def peer_name(name: str | None, on_gpu: bool) -> str:
    return (PEERS if on_gpu else PEERS | CPU_PEERS).get(name or "", name or NONE)


def rate_of(row: Row, name: str, on_gpu: bool) -> float | None:
    """TFLOP/s of a GPU, GFLOP/s of a CPU, GB/s where moving bytes is the work."""
    implementation = row["implementations"].get(name, {})
    if not implementation.get("ms"):
        return None
    if "gb_per_s" in implementation:
        return implementation["gb_per_s"]
    # From the FLOPs of the row: a file may leave the rate of a peer out.
    ours = row["implementations"]["ours"]
    gflops = implementation.get("gflops") or ours["gflops"] * ours["ms"] / implementation["ms"]
    return gflops / 1e3 if on_gpu else gflops


def unit_of(rows: list[Row], on_gpu: bool) -> str:
    if any("gb_per_s" in row["implementations"]["ours"] for row in rows):
        return "GB/s"
    return "TFLOP/s" if on_gpu else "GFLOP/s"


def format_number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_ms(implementation: dict[str, Any] | None) -> str:
    if implementation is None:
        return NONE
    if implementation["ms"] is None:
        return "wrong" if implementation.get("check", {}).get("status") == "failed" else NONE
    ms = implementation["ms"]
    text = f"{ms:.4f}" if ms < 1 else f"{ms:.3f}" if ms < 10 else f"{ms:,.1f}"
    return f"~{text}" if "estimated_from_heads" in implementation else text


def paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def bullet(text: str) -> str:
    return paragraph(f"- {text}", "  ")


# bench/results/README.md


def results_page(files: list[ResultsFile]) -> str:
    """Every row of every file."""
    parts = [
        "# All results",
        paragraph(
            "Generated from the files of this folder by `make docs`. A ratio is the best peer's "
            "time over ours: above 1 we are faster. Sustained: without pauses, at the power limit "
            "of a GPU; rested: the same pause before every turn. A ~ marks a peer so slow that it "
            "was called once on a few heads, and the time scaled."
        ),
    ]
    parts += [file_section(file) for file in files if file.rows]
    if unlabelled := [file.path.name for file in files if not file.rows]:
        text = "Not shown, since they do not say in which regime they were measured: "
        parts.append(paragraph(f"{text}{', '.join(unlabelled)}."))
    if not files:
        parts.append("No results are committed yet; `make bench` measures your machine.")
    return "\n\n".join(parts) + "\n"


def numbers_of(shape: dict[str, Any]) -> str:
    """What the numbers of a shape are."""
    if "length" in shape:
        return "batch, heads, length, dim"
    if "experts" in shape:
        return "tokens, width, inner, experts, k"
    return "tokens, heads, dim, page"


def file_section(file: ResultsFile) -> str:
    results, about, on_gpu = file.results, file.about, file.about.get("device") == "cuda"
    peers = list(dict.fromkeys(n for r in file.rows for n in r["implementations"] if n != "ours"))
    peers = [p for p in peers if any(r["implementations"].get(p) for r in file.rows)]
    where = f"{file.machine}; {file.provenance}"
    where += f"; FLASHMOE_FAMILY={about['forced_family']}" if about.get("forced_family") else ""
    clocks = [about.get(f"gpu_state_{when}") for when in ("before", "after")]
    if all(clocks):
        before, after = (state["clocks.sm"] for state in clocks)
        where += f"; SM clock {before} before the run, {after} after it"
    if "turns" in results:
        where += f"; the median of {results['turns']} turns of {results['budget_s']:g} s"
    where += "" if results.get("complete", True) else "; cut short"
    sizes = " or ".join(dict.fromkeys(numbers_of(row["shape"]) for row in file.rows))
    header = ["workload", sizes, "dtype", "pass", "regime", "ours ms"]
    header += [unit_of([], on_gpu), *(f"{peer_name(p, on_gpu)} ms" for p in peers), "ratio"]
    lines = [markdown_row(header), markdown_row(["---"] * 5 + ["--:"] * (len(header) - 5))]
    for row in file.rows:
        found = row["implementations"]
        wrong = row.get("check", {}).get("status") == "failed"
        rate = format_number(None if wrong else rate_of(row, "ours", on_gpu))
        rate += " GB/s" if "gb_per_s" in found["ours"] and not wrong else ""
        cells = [row["workload"], row["label"].replace(",", ", "), row["dtype"], row["pass"]]
        cells += [row["regime"], "wrong" if wrong else format_ms(found["ours"]), rate]
        cells += [format_ms(found.get(peer)) for peer in peers]
        ratio = None if wrong else row["ratio"]
        lines.append(markdown_row([*cells, NONE if ratio is None else f"{ratio:.2f}"]))
    return "\n\n".join([f"## {file.path.stem}", paragraph(f"{where}."), "\n".join(lines)])


# docs/speed.md


@dataclass(frozen=True)
class Section:
    """One workload on one machine: of each kind the rows of the newest file that has them."""

    workload: str
    machine: str
    on_gpu: bool
    rows: list[Row]
    files: list[ResultsFile]

    @property
    def title(self) -> str:
        return f"{self.workload.replace('_', ' ').capitalize()}, {self.machine}"

    @property
    def picture(self) -> str:
        """Its file in docs/, named as the results are."""
        machine = RESULT_FILE.fullmatch(self.files[0].path.name)["machine"]
        return f"speed/{self.workload}-{machine}.svg"

    @property
    def regime(self) -> str:
        """The one that counts."""
        return headline(self.rows)[0]["regime"]

    @property
    def shown(self) -> list[Row]:
        """The rows of that regime that have something to be compared with."""
        return [row for row in headline(self.rows) if row["ratio"]]

    @property
    def unit(self) -> str:
        return unit_of(self.rows, self.on_gpu)


def sections_of(files: list[ResultsFile], workloads: list[str]) -> list[Section]:
    """GPUs first, workloads in the order of the benchmark. Forced families are for engineers."""
    measured: dict[tuple[str, str, Kind], list[tuple[ResultsFile, Row]]] = {}
    for file in files:
        for row in file.rows if not file.about.get("forced_family") else ():
            key = (file.machine, row["workload"], kind_measured(row))
            measured.setdefault(key, []).append((file, row))
    newest = {key: newest_of(of_key) for key, of_key in measured.items()}
    machines = {file.machine: file.about.get("device") == "cuda" for file in newest.values()}
    found = []
    for machine in sorted(machines, key=lambda m: (not machines[m], m)):
        for workload in workloads:
            chosen = {k[2]: f for k, f in newest.items() if k[:2] == (machine, workload)}
            if machines[machine]:
                chosen = usual_dtype(chosen)
            rows = [
                row
                for kind, file in chosen.items()
                for row in file.rows
                if (row["workload"], kind_measured(row)) == (workload, kind) and is_right(row)
            ]
            rows.sort(key=lambda row: (list(PASSES).index(row["pass"]), kind_measured(row)[2]))
            used = list({file.path: file for file in chosen.values()}.values())
            found.append(Section(workload, machine, machines[machine], rows, used))
    return [section for section in found if section.rows and section.shown]


def newest_of(measured: list[tuple[ResultsFile, Row]]) -> ResultsFile:
    """The newest file, but none without the regime that counts, and none that left out the best
    peer of a row, where another one has them."""
    counting = headline([row for _, row in measured])
    measured = [(file, row) for file, row in measured if row in counting]
    ran: dict[Path, set[str]] = {}
    best: dict[str, tuple[float, str]] = {}  # of each shape
    for file, row in measured:
        times = {n: x["ms"] for n, x in row["implementations"].items() if x.get("ms")}
        times.pop("ours", None)
        ran.setdefault(file.path, set()).update(times)
        before = best.get(row["label"], (math.inf, ""))
        best[row["label"]] = min([before, *((ms, name) for name, ms in times.items())])
    wanted = {name for ms, name in best.values() if ms < math.inf}
    files = [file for file, _ in measured]
    complete = [file for file in files if wanted <= ran[file.path]]
    return max(complete or files, key=lambda file: file.about["date"])


Kind = tuple[str, str, bool]  # pass, dtype, and whether a cache is fp8
Chosen = dict[Kind, ResultsFile]


def kind_measured(row: Row) -> Kind:
    return row["pass"], row["dtype"], bool(row["shape"].get("e4m3"))


def usual_dtype(chosen: Chosen) -> Chosen:
    """Of a GPU no fp16, in a pass that has bf16: it tells the same story."""
    in_bf16 = {direction for direction, dtype, _ in chosen if dtype == "bf16"}
    return {k: f for k, f in chosen.items() if k[1] != "fp16" or k[0] not in in_bf16}


def is_right(row: Row) -> bool:
    return row.get("check", {}).get("status") != "failed"


def groups_of(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of a line of the table and a panel of the picture, by its name."""
    dtypes = {row["dtype"] for row in rows}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = PASSES[row["pass"]] + (f", {row['dtype']}" if len(dtypes) > 1 else "")
        groups.setdefault(name, []).append(row)
    split: dict[str, list[Row]] = {}
    for name, members in groups.items():
        for row in members:
            detail = "".join(f", {word}" for word in kind_of(row["shape"]))
            split.setdefault(name + detail * (len(members) > CROWDED), []).append(row)
    return split


def kind_of(shape: dict[str, Any]) -> list[str]:
    """What the rows of a group have in common."""
    flags = [flag for flag in ("causal", "e4m3") if shape.get(flag)]
    if shape.get("page"):
        return [f"pages of {shape['page']}", *flags]
    return [f"head dim {shape['dim']}", *flags] if "dim" in shape else []


def size_names(rows: list[Row]) -> list[str]:
    """What tells the rows of a group apart: lengths where those do, else whole shapes."""
    if not all("length" in row["shape"] for row in rows):
        return [row["label"] for row in rows]
    shapes = [row["shape"] for row in rows]
    if shapes[0].get("page"):
        return [paged_name(shape) for shape in shapes]
    # Of dense rows the batch follows from the length.
    others = [{k: v for k, v in shape.items() if k not in ("batch", "length")} for shape in shapes]
    if len({s["length"] for s in shapes}) == len(rows) and all(o == others[0] for o in others):
        return [f"{shape['length']:,}" for shape in shapes]
    return [row["label"] for row in rows]


def paged_name(shape: dict[str, Any]) -> str:
    """Sequences and keys, a chunk's tokens, pages that are not the usual ones, and fp8."""
    page = f"p{shape['page']}" if shape["page"] != USUAL_PAGE else ""
    chunk = f"q{shape['queries']}" if shape.get("queries") else ""
    words = [chunk, page, "e4m3" if shape.get("e4m3") else ""]
    return " ".join([f"{shape['batch']} x {shape['length']:,}", *filter(None, words)])


def few_of(count: int) -> list[int]:
    """The first, the middle and the last of so many."""
    return sorted({0, count // 2, count - 1})


def section_table(section: Section) -> str:
    wide = max(len(few_of(len(members))) for members in groups_of(section.shown).values())
    heading = f"size: ratio (ours, best peer in {section.unit})"
    lines = [markdown_row(["", heading, *[""] * (wide - 1)]), markdown_row(["---"] * (1 + wide))]
    for name, members in groups_of(section.shown).items():
        sizes, cells = size_names(members), []
        for i in few_of(len(members)):
            row, peer = members[i], members[i]["best_peer"]
            ratio = f"{row['ratio']:.2f}"
            ratio = f"**{ratio}**" if float(ratio) < 1 else ratio
            ours, theirs = (format_number(rate_of(row, n, section.on_gpu)) for n in ("ours", peer))
            who = peer_name(peer, section.on_gpu)
            cells.append(f"{sizes[i]}: {ratio} ({ours}, {who} {theirs})")
        lines.append(markdown_row([name, *cells, *[""] * (wide - len(cells))]))
    return "\n".join(lines)


def standing(section: Section, direction: str, regime: str) -> str:
    """Means against the best peer and each of them, and where we are slower; "" if unmeasured."""
    rows = [r for r in section.rows if (r["pass"], r["regime"]) == (direction, regime)]
    rows = [row for row in rows if row["ratio"]]
    if not rows:
        return ""
    ratios = [row["ratio"] for row in rows]
    peers = list(dict.fromkeys(p for row in rows for p in row.get("ratios", {})))
    text = f"{PASSES[direction].capitalize()}, {regime}: {geometric_mean(ratios):.2f}"
    each = []
    for peer in peers:
        of_peer = [row["ratios"][peer] for row in rows if peer in row["ratios"]]
        each.append(f"{peer_name(peer, section.on_gpu)} {geometric_mean(of_peer):.2f}")
    text += f" ({', '.join(each)})" if each else ""
    lost = [row for row in rows if round(row["ratio"], 2) < 1]
    count = f"{len(rows)} row{'s' if len(rows) > 1 else ''}"
    if not lost:
        return f"{text} over {count}, slower in none."
    worst = min(lost, key=lambda row: row["ratio"])
    where = worst["label"].replace(",", ", ")
    return f"{text} over {count}, slower in {len(lost)}, lowest {worst['ratio']:.2f} ({where})."


def timed_in_graphs(rows: list[Row], on_gpu: bool) -> str:
    """A sentence about rows timed as CUDA graphs, with the peers that were not; "" of others."""
    methods = {
        (peer_name(name, on_gpu), (implementation.get("method") or "").split(" of ")[0])
        for row in rows
        for name, implementation in row["implementations"].items()
        if implementation["ms"]
    }
    if ("ours", "CUDA graph") not in methods:
        return ""
    others = sorted({name for name, method in methods if method != "CUDA graph"})
    return f" Timed as CUDA graphs{', not always ' if others else ''}{' and '.join(others)}."


def section_text(section: Section, summary: str) -> str:
    standings = [standing(section, p, r) for p in PASSES for r in (SUSTAINED, RESTED)]
    files = [file.path.stem for file in section.files]
    rows = ", ".join(f"[{name}](../bench/results/README.md#{name})" for name in files)
    where = "; ".join(dict.fromkeys(file.provenance for file in section.files))
    about = f"{summary[0].upper()}{summary[1:]}"
    graphs = timed_in_graphs(section.shown, section.on_gpu)
    return "\n\n".join([
        f"## {section.title}",
        paragraph(f"{about}. The table is {section.regime}.{graphs} {where}. All rows: {rows}."),
        f"![Ours beside the best peer]({section.picture})",
        section_table(section),
        "\n".join(bullet(text) for text in standings if text),
    ])  # fmt: skip


def speed_page(sections: list[Section], summaries: dict[str, str]) -> str:
    parts = [
        "# Speed",
        paragraph(
            "Generated from `bench/results/` by `make docs`. A ratio is the best peer's time over "
            "ours: above 1 we are faster, **below 1 slower**. Everyone is timed in the same run, "
            "turn by turn, in changing order; the median of the turns counts. Sustained: without "
            "pauses, at the power limit of a GPU, as in training. Rested: the same pause before "
            "every turn. Sizes are a sequence's length, or batch, heads, length, head dim; over "
            "pages sequences x keys, q512 a chunk of so many tokens; of experts tokens, width, "
            "inner width, experts, experts of a token; of append tokens, heads, head dim, page. "
            "`python "
            "-m flashmoe_science bench` measures your machine, and `--peer FILE.py` your own "
            "implementation beside ours."
        ),
    ]
    parts += [section_text(section, summaries[section.workload]) for section in sections]
    if not sections:
        parts.append("No results are committed yet.")
    return "\n\n".join([*parts, PEER_HELP]) + "\n"


PEER_HELP = """\
## Your own implementation beside ours

```python
# peer.py
import theirs

NAME = "theirs"  # how the table calls it; without it, the file's name


def attention(q, k, v, causal):  # (B, S, H, D), k and v (B, S, Hkv, D); out as q
    return theirs.attention(q, k, v, is_causal=causal)
```

`python -m flashmoe_science bench --workload dense,gqa --peer peer.py` checks it against float64,
gradients included where they are timed, by the rule that ours is held to, and then gives it the
same turns. What is wrong is reported and not timed. A function
`attention_varlen(q, k, v, cu_seqlens, max_seqlen, causal)` is for ragged batches,
`attention_paged(q, k_cache, v_cache, block_table, seq_lens, ...)` and `cache_append(k, v, k_cache,
v_cache, slot_mapping)` are for caches in pages, and parameters `bias`, `window` and
`deterministic` are for workloads that need them:
`python/flashmoe_science/bench/peer_file.py` says it all."""


def readme_block(sections: list[Section]) -> str:
    """The picture of the first section, and what it says."""
    if not sections:
        return "No results are committed yet; `make bench` measures your machine."
    first = sections[0]
    texts = [text for p in PASSES if (text := standing(first, p, first.regime))]
    lines = "\n".join(bullet(text) for text in texts)
    title = f"{first.workload.replace('_', ' ')} attention on {first.machine}"
    return (
        f"![Ours beside the best peer](docs/{first.picture})\n\n"
        f"{title[0].upper()}{title[1:]}, the best peer's time over ours, "
        f"{first.files[0].about['date'][:10]}:\n\n{lines}\n\n"
        "All workloads, and where we are slower: [docs/speed.md](docs/speed.md)."
    )


def picture(section: Section) -> str:
    panels = []
    for name, rows in groups_of(section.shown).items():
        pairs = [
            tuple(rate_of(row, n, section.on_gpu) or 0.0 for n in ("ours", row["best_peer"]))
            for row in rows
        ]
        panels.append(Panel(name, size_names(rows), pairs, [row["ratio"] for row in rows]))
    where = "; ".join(dict.fromkeys(file.provenance for file in section.files))
    return draw(
        f"{section.title}, {section.regime}", f"{section.unit}, higher is better", panels, where
    )


def pages(root: Path, workloads: dict[str, Any]) -> tuple[dict[str, str], str]:
    """The text of every generated file by its path, and the block of README.md."""
    files = read_files(root / "bench" / "results")
    sections = sections_of(files, list(workloads))
    summaries = {name: workload.summary for name, workload in workloads.items()}
    found = {
        "docs/speed.md": speed_page(sections, summaries),
        "bench/results/README.md": results_page(files),
        **{f"docs/{section.picture}": picture(section) for section in sections},
    }
    return found, readme_block(sections)
