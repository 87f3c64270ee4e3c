"""`python -m failfast_jax.bench`: the paper's comparison, measured.

Answers the questions of one or several datasets with `vanilla` and with each method, back to back, and writes
records, a summary and figures into one folder. A run that was killed goes on from there; so does one that is
given further methods, datasets or questions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from failfast_jax.bench import parts, report, scoring
from failfast_jax.bench.datasets import SOURCES, Dataset, load_dataset
from failfast_jax.bench.engine_pool import EnginePool
from failfast_jax.bench.harness import Comparison
from failfast_jax.bench.journal import PARTS, SCORE, Journal, Record
from failfast_jax.bench.modelled import Latency, latency_for, parse_latency
from failfast_jax.bench.variants import (
    BASELINE,
    SWEPT,
    VANILLA,
    Sweep,
    Variant,
    check_labels,
    make_variant,
    option_fields,
    parse_methods,
    parse_options,
    parse_values,
    split_methods,
)
from failfast_jax.config import GenerationConfig
from failfast_jax.drafters import METHODS
from failfast_jax.generate import ATTENTION_KERNELS
from failfast_jax.platforms import machine

ALL = "all"
RECORDS = "records.jsonl"
DEFAULTS: dict[str, Any] = {
    "target": None,
    "drafter": None,
    "ar_drafter": None,
    "dtype": None,
    "tensor_parallel": 1,
    "attention": None,
    "methods": [ALL],
    "sweep": [],
    "dataset": None,
    "data": [],
    "limit": None,
    "max_new_tokens": 256,
    "set": [],
    "repeats": 1,
    "near_tie": 1e-3,
    "modelled": None,
    "out": "failfast-bench",
    "records": "jsonl",
    "scores": True,
    "parts": True,
    "figures": True,
}
"""What flags and the file of `--config` may say; the file's `options` is a mapping for `--set`."""


# -- what was asked for --------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m failfast_jax.bench", description=__doc__)
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML with the long names below as keys")
    what = parser.add_argument_group("what")
    what.add_argument("--dataset", metavar="D", action="append", help=f"{', '.join(SOURCES)}, or a file of prompts")
    what.add_argument(
        "--data",
        metavar="[D=]FILE",
        action="append",
        help="JSONL, JSON or Parquet with the rows of dataset D, instead of its package or the Hub",
    )
    what.add_argument("--limit", metavar="n", type=int, help="first n rows of each dataset")
    what.add_argument(
        "--methods",
        metavar="a,b",
        help=f"method or method:key=value,...; of {', '.join(METHODS)}, fast-dllm+ (its length swept), or all",
    )
    what.add_argument(
        "--sweep",
        metavar="a:b",
        action="append",
        help="draft lengths of ar and fast-dllm+, the best per dataset is reported; or method:key=v1|v2|...",
    )
    what.add_argument("--max-new-tokens", metavar="n", type=int)
    what.add_argument(
        "--set", metavar="key=value", nargs="+", action="extend", help=f"for all methods: {', '.join(option_fields())}"
    )
    what.add_argument("--repeats", metavar="n", type=int, help="answers a question and method")
    models = parser.add_argument_group("models", "without any of them, the default pair")
    models.add_argument("--target", metavar="P")
    models.add_argument("--drafter", metavar="P", help="for the methods that draft by diffusion")
    models.add_argument("--ar-drafter", metavar="P", help="for the methods that draft token by token")
    models.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    models.add_argument("--tensor-parallel", metavar="n", type=int, help="devices that share each layer")
    models.add_argument("--attention", choices=ATTENTION_KERNELS, help="kernel of cached attention")
    result = parser.add_argument_group("result")
    result.add_argument("--out", metavar="DIR", help=f"an interrupted run continues there ({DEFAULTS['out']})")
    result.add_argument("--records", choices=("jsonl", "parquet"), help="parquet: also write records.parquet")
    result.add_argument("--near-tie", metavar="x", type=float, help="logit gap that excuses a flip")
    result.add_argument(
        "--modelled", metavar="X", help="latencies of the modelled speedup: 7B, 14B, 32B or DRAFT:TARGET"
    )
    for name, said in (
        ("scores", "is each answer right?"),
        ("parts", "time draft and verify apart, for the latency split"),
        ("figures", "PNG and SVG"),
    ):
        result.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=said)
    return parser


def read_config(path: Path) -> dict[str, Any]:
    """The YAML file of `--config`.

    Raises:
      ValueError: it cannot be read, is no mapping or has an unknown key; the message names file and key.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError(f'--config: needs PyYAML ({error}): pip install -e ".[bench]"') from None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a mapping")
    renamed = {"datasets": "dataset", "options": "set"}
    config = {}
    for key, value in found.items():
        name = renamed.get(key, str(key).replace("-", "_"))
        if name not in DEFAULTS or key == "set":
            raise ValueError(f"{path}: unknown key {key!r} (keys: {', '.join([*DEFAULTS, *renamed])})")
        expected = type(DEFAULTS[name])
        if expected in (bool, int, float) and not (isinstance(value, expected) or (expected is float and value == 0)):
            raise ValueError(f"{path}: {key} {value!r}: must be of type {expected.__name__}")
        if name in ("dataset", "methods", "sweep", "data") and not isinstance(value, list):
            value = [value]
        config[name] = value
    if config.get("limit") is not None and not isinstance(config["limit"], int):
        raise ValueError(f"{path}: limit {config['limit']!r}: must be an integer")
    options = config.get("set", {})
    if not isinstance(options, dict):
        raise ValueError(f"{path}: options: must be a mapping")
    config["set"] = [f"{key}={'none' if value is None else value}" for key, value in options.items()]
    return config


def merged(args: argparse.Namespace) -> argparse.Namespace:
    """Flags over the file of `--config` over defaults."""
    found = dict(DEFAULTS)
    if args.config is not None:
        found |= read_config(args.config)
    given = {name: value for name, value in vars(args).items() if name in DEFAULTS and value is not None}
    if "methods" in given:
        given["methods"] = split_methods(given["methods"])
    if "dataset" in given:
        given["dataset"] = [name for text in given["dataset"] for name in text.split(",") if name]
    found |= given
    return argparse.Namespace(**found)


def read_datasets(args: argparse.Namespace) -> list[Dataset]:
    """Datasets from names, or from mappings with `name`, `data`, `limit` and `template`."""
    if not args.dataset:
        raise ValueError(f"--dataset: name one of {', '.join(SOURCES)}, or a file of prompts")
    files: dict[str | None, Path] = {}
    for text in args.data:
        name, equals, file = str(text).partition("=")
        files[name if equals else None] = Path(file if equals else text)
    if None in files and len(args.dataset) > 1:
        raise ValueError(f"--data {files[None]}: of which dataset? Write --data D={files[None]}")
    datasets: dict[str, Dataset] = {}
    for entry in args.dataset:
        entry = {"name": entry} if isinstance(entry, str) else entry
        if (
            not isinstance(entry, Mapping)
            or "name" not in entry
            or entry.keys() - {"name", "data", "limit", "template"}
        ):
            raise ValueError(f"datasets: {entry!r} must be a name, or have the keys name, data, limit, template")
        name = str(entry["name"])
        data = entry.get("data") or files.pop(name, None) or files.pop(None, None)
        dataset = load_dataset(
            name,
            data=Path(data) if data is not None else None,
            limit=entry.get("limit", args.limit),
            template=entry.get("template"),
        )
        if dataset.name in datasets:
            raise ValueError(f"--dataset {name}: named twice")
        datasets[dataset.name] = dataset
    if files:
        raise ValueError(f"--data {next(iter(files))}={next(iter(files.values()))}: --dataset does not name it")
    return list(datasets.values())


def read_variants(args: argparse.Namespace) -> tuple[list[Variant], list[Sweep], set[str]]:
    """Settings (sweeps' points among them), sweeps, and the labels that only `all` asked for."""
    texts, extra, swept = [], [], []
    everything = ALL in args.methods
    for entry in args.methods:
        if isinstance(entry, str):
            texts.append(entry)
            continue
        if not isinstance(entry, Mapping) or entry.keys() - {"method", "label", "options", "sweep"}:
            raise ValueError(f"methods: {entry!r} must be text, or have the keys method, label, options, sweep")
        method, shown = str(entry.get("method")), f"methods: {entry!r}"
        setting = make_variant(method, entry.get("options"), entry.get("label"), shown=shown)
        if "sweep" not in entry:
            extra.append(setting)
            continue
        for key, values in dict(entry["sweep"]).items():
            if not isinstance(values, (str, list)):
                raise ValueError(f'{shown}: values of a sweep must be a list, or a range in quotes like "3:20"')
            values = parse_values(shown, key, values, method) if isinstance(values, str) else tuple(values)
            swept.append(Sweep(f"{entry.get('label') or method}:{key}", method, key, values, setting.options))
    named = [text for text in texts if text != ALL]
    if everything:
        bare = any("=" not in text for text in args.sweep)
        rest = [m for m in (*METHODS, *(m for m in SWEPT if bare and m not in METHODS)) if m != BASELINE]
        texts = [*named, *(m for m in rest if m not in named)]
    settings, more = parse_methods(texts, [str(text) for text in args.sweep])
    sweeps = [*swept, *more]
    settings = [*settings, *extra]
    optional = set()
    if everything:
        asked = {*named, *(s.label for s in extra)}
        optional |= {s.label for s in settings if s.label not in asked}
        optional |= {s.label for w in sweeps if w.name not in asked and ":" not in w.name for s in w.settings()}
    return check_labels([*settings, *(s for w in sweeps for s in w.settings())]), sweeps, optional


# -- after the answers ---------------------------------------------------------------------------------------


def score_answers(comparison: Comparison, records: list[Record]) -> None:
    """Scores each different text of each question once, into the journal."""
    journal, tokenizer = comparison.journal, comparison.engines.base.tokenizer
    work: dict[tuple, tuple] = {}
    scored = {d.name: d for d in comparison.datasets if d.scoring}
    references = {(d.name, q.id): q.reference for d in scored.values() for q in d.questions}
    for record in records:
        reference = references.get((record["dataset"], record["question"]))
        if reference is None:
            continue
        text = tokenizer.decode(record["output_ids"], skip_special_tokens=True)
        key = record["dataset"], record["question"], scoring.text_stamp(text)
        if key not in journal.lines[SCORE]:
            work[key] = scored[record["dataset"]].scoring, text, reference
    if not work:
        return
    for (dataset, question, stamp), task in tqdm(work.items(), desc="scores", unit="answer", file=sys.stderr):
        place = {"dataset": dataset, "question": question, "text": stamp}
        journal.append({"kind": SCORE, **place, "right": scoring.is_right(*task)})


def add_scores(table: dict[str, dict[str, Any]], comparison: Comparison, records: list[Record]) -> None:
    """Adds each setting's share of right answers."""
    tokenizer, scores = comparison.engines.base.tokenizer, comparison.journal.lines[SCORE]
    for label, row in table.items():
        found = []
        for r in records:
            if r["setting"] == label:
                stamp = scoring.text_stamp(tokenizer.decode(r["output_ids"], skip_special_tokens=True))
                found.append(scores.get((r["dataset"], r["question"], stamp)))
        right = [line["right"] for line in found if line is not None]
        row["score"] = sum(right) / len(right) if right else None


def time_parts(comparison: Comparison, wanted: list[tuple[Dataset, Variant]]) -> None:
    """Times the parts of each setting's round on a dataset's prompt of median length, into the journal."""
    journal = comparison.journal
    left = [(d, s) for d, s in wanted if (d.name, s.label) not in journal.lines[PARTS]]
    if not left:
        return
    for dataset, setting in tqdm(left, desc="parts of a round", unit="setting", file=sys.stderr):
        first = [q for q in dataset.questions if q.follows is None]
        question = sorted(first, key=lambda q: len(comparison.encode(dataset, q)))[len(first) // 2]
        engine = comparison.engine_for(setting, dataset, question)
        found = parts.measure(engine, comparison.configs[setting.label], comparison.encode(dataset, question))
        if found is not None:
            place = {"dataset": dataset.name, "setting": setting.label, "question": question.id}
            journal.append({"kind": PARTS, **place, **found})


def write_parquet(records: list[Record], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    # Columns from all records, not from the first one alone; options have other fields in each setting.
    names = dict.fromkeys(name for record in records for name in record)
    rows = [
        {name: record.get(name) for name in names} | {"options": json.dumps(record["options"])} for record in records
    ]
    temporary = path.with_suffix(".tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
    temporary.replace(path)


# -- the summary ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """Tables of one dataset.

    Attributes:
      table: `report.totals` with its additions, of every setting.
      names: labels that get a row of their own, with the row's name.
      sweeps: per sweep, its points and the best of them.
    """

    dataset: Dataset
    table: dict[str, dict[str, Any]]
    names: dict[str, str]
    sweeps: dict[str, tuple[list[str], str | None]]


def summarise(dataset: Dataset, comparison: Comparison, sweeps: Sequence[Sweep], records: list[Record]) -> Summary:
    """Tables without what is timed or scored afterwards."""
    labels = [s.label for s in comparison.settings]
    table = report.totals(records, labels)
    points = {w.name: [s.label for s in w.settings() if s.label in table] for w in sweeps}
    swept = {name: (found, report.best_of(table, found)) for name, found in points.items() if found}
    names = {BASELINE: BASELINE}
    names |= {s.label: s.label for s in comparison.settings if not s.sweep}
    for name, (_, best) in swept.items():
        if best is not None:
            names[best] = f"{name} (best: {best.rpartition(':')[2]})"
    return Summary(dataset, table, names, swept)


def write_summary(
    out: Path,
    summaries: Sequence[Summary],
    args: argparse.Namespace,
    common: GenerationConfig,
    host: Record,
    latency: Latency,
    left_out: Mapping[str, str],
    models: Mapping[str, str | None],
) -> str:
    """Writes summary.md, summary.json and summary.csv; returns the Markdown."""
    rows = [row for s in summaries for row in s.table.values()]
    decode, harness = (sum(row[name] for row in rows) for name in ("decode_s", "harness_s"))
    changed = {
        k: v
        for k, v in dataclasses.asdict(common).items()
        if k in option_fields() and v != getattr(GenerationConfig(), k)
    }
    said = ", ".join(f"{k} {v}" for k, v in changed.items())
    lines = [
        "# Benchmark",
        f"{host['device']}, {host['processor']}, {host['cores']} cores, JAX {host['jax']}, Python {host['python']}, "
        f"{host['date']}.",
        ", ".join(
            f"{said} `{models[name]}`"
            for name, said in (("target", "Target"), ("drafter", "drafter"), ("ar_drafter", "autoregressive drafter"))
            if models[name]
        )
        + f"; at most {common.max_new_tokens} new tokens, batch 1, repeats: {args.repeats}, "
        f"options for all: {said or 'none'}.",
        "Speedup: decode time of `vanilla` over decode time, each question's answers timed back to back, warm-ups "
        "thrown away, prefill left out. Accepted and speculated tokens are per round. The split of the compiled "
        "loop's time is attributed: on one prompt draft and verify are timed apart, per pass and per width; what the "
        "loop takes beside them is `other`. "
        f"Modelled: the paper's model with these statistics at {latency.draft_pass:g} ms a drafter pass and "
        f"{latency.target_step:g} ms a target step ({latency.name}), and with this machine's own costs.",
        f"The harness cost {harness:.2f} s beside {decode:.1f} s of decoding ({100 * harness / decode:.2f} %).",
    ]
    for summary in summaries:
        lines += [f"## {summary.dataset.name}: {len(summary.dataset.questions)} questions"]
        lines += [report.summary_table(summary.table, summary.names, latency)]
        lines += [line for line in [report.verdict_on_speed(summary.table, summary.names)] if line]
        for name, (points, best) in summary.sweeps.items():
            lines += [f"Sweep `{name}`:", report.sweep_table(summary.table, points, best)]
    if left_out:
        lines += ["Left out: " + "; ".join(f"`{name}` ({why})" for name, why in left_out.items()) + "."]
    text = "\n\n".join(lines) + "\n"
    found = {
        "machine": host,
        "models": {**models, **{name: getattr(args, name) for name in ("dtype", "tensor_parallel", "attention")}},
        "options": {"max_new_tokens": common.max_new_tokens, **changed},
        "repeats": args.repeats,
        "modelled_with": dataclasses.asdict(latency),
        "harness_s": harness,
        "decode_s": decode,
        "harness_share": harness / decode,
        "left_out": dict(left_out),
        "datasets": {
            s.dataset.name: {
                "questions": len(s.dataset.questions),
                "stamp": s.dataset.stamp,
                "rows": s.names,
                "sweeps": {name: {"points": points, "best": best} for name, (points, best) in s.sweeps.items()},
                "settings": s.table,
            }
            for s in summaries
        },
    }
    flat = [
        {"dataset": s.dataset.name, "setting": label, "row": s.names.get(label, ""), **row}
        for s in summaries
        for label, row in s.table.items()
    ]
    for name, content in (("md", text), ("json", report.to_json(found)), ("csv", report.to_csv(flat))):
        (out / f"summary.{name}").write_text(content, encoding="utf-8")
    return text


# -- the run -------------------------------------------------------------------------------------------------


def usable(
    engines: EnginePool, settings: list[Variant], common: GenerationConfig, optional: set[str]
) -> dict[str, str]:
    """Settings that only `all` asked for and that cannot run here, with the reason."""
    left_out = {}
    for setting in settings:
        if setting.label in optional:
            try:
                engines.prepare(setting, setting.config(common))
            except ValueError as error:
                left_out[setting.label] = str(error).removeprefix(f"{setting.label}: ")
    return left_out


def run(args: argparse.Namespace) -> int:
    args = merged(args)
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: must be at least 1")
    common = GenerationConfig(
        max_new_tokens=args.max_new_tokens, **parse_options((f"--set {text}", text) for text in args.set)
    )
    common.validate()
    settings, sweeps, optional = read_variants(args)
    for setting in settings:
        setting.config(common)
    latency = latency_for(args.target) if args.modelled is None else parse_latency(str(args.modelled))
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; name a folder")
    datasets = read_datasets(args)
    if args.figures:
        from failfast_jax.bench import figures

        figures.figure_class("--figures")  # before hours of answers
    if args.records == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ValueError(f'--records parquet: needs pyarrow ({error}): pip install -e ".[bench]"') from None
    elif args.records != "jsonl":
        raise ValueError(f"--records {args.records}: must be jsonl or parquet")
    for dataset in datasets:
        if args.scores:
            scoring.needs(dataset.scoring)

    engines = EnginePool(
        args.target,
        args.drafter,
        args.ar_drafter,
        args.dtype,
        tensor_parallel=args.tensor_parallel,
        attention=args.attention,
    )
    left_out = usable(engines, settings, common, optional)
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    settings = [s for s in settings if s.label not in left_out]
    if not settings:
        raise ValueError("--methods: none of them can run here")
    if args.scores and engines.base.tokenizer is None and any(d.scoring for d in datasets):
        raise ValueError(f"{engines.base.target_name} has no tokenizer, so that answers have no text: --no-scores")
    host = machine()
    identity = {
        **engines.identity(),
        "options": {k: v for k, v in dataclasses.asdict(common).items() if k != "method"},
        "machine": {k: host[k] for k in ("device", "processor", "cores", "jax")},
    }
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out / RECORDS, identity, host)
    comparison = Comparison(engines, datasets, settings, common, journal, repeats=args.repeats, near_tie=args.near_tie)
    comparison.run()
    records = comparison.records()
    if args.scores:
        score_answers(comparison, records)
    by_dataset = {d.name: [r for r in records if r["dataset"] == d.name] for d in datasets}
    summaries = [summarise(d, comparison, sweeps, by_dataset[d.name]) for d in datasets]
    if args.parts:
        by_label = {s.label: s for s in (VANILLA, *settings)}
        time_parts(comparison, [(s.dataset, by_label[label]) for s in summaries for label in s.names])
    for summary in summaries:
        rows = by_dataset[summary.dataset.name]
        costs = {
            setting: line
            for (dataset, setting), line in journal.lines[PARTS].items()
            if dataset == summary.dataset.name and args.parts
        }
        report.add_models(summary.table, rows, costs, latency)
        if args.scores and summary.dataset.scoring:
            add_scores(summary.table, comparison, rows)
    print(write_summary(out, summaries, args, common, host, latency, left_out, engines.names()))
    if args.records == "parquet":
        write_parquet(records, out / "records.parquet")
    if args.figures:
        for file in figures.draw_all(out, out / "figures"):
            print(file, file=sys.stderr)
    verdicts = [row["verdicts"] for s in summaries for row in s.table.values()]
    return 1 if any(found[report.DIFFERENT] for found in verdicts) else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; exit status 1 if any output differs beyond a near-tie, 2 for bad input."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
