"""What `bench run` was asked for: flags, the YAML file of `--config`, and what they name."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from failfast_jax.bench.summary import BEST, TIMED
from failfast_jax.bench.variants import (
    BASELINE,
    SWEPT,
    Variant,
    check_labels,
    check_option,
    make_variant,
    option_names,
    parse_method,
    parse_options,
    parse_sweep,
    split_methods,
    split_sweep,
    sweep,
    sweep_values,
)
from failfast_jax.checkpoints.checkpoint import DTYPES
from failfast_jax.drafters import METHODS
from failfast_jax.models.attention import KERNELS
from failfast_jax.public_data import question_sets
from failfast_jax.public_data.question_sets import CHOICES, SOURCES, Dataset, load_dataset
from failfast_jax.util import processes
from failfast_jax.util.command_line import import_optional
from failfast_jax.util.files import user_path

ALL = "all"
PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
"""Files of `--config` that come with the package, by name."""
OURS, RELEASED = "ours", "released"
DEFAULTS: dict[str, Any] = {
    "target": None,
    "drafter": None,
    "ar_drafter": None,
    "dtype": None,
    "tensor_parallel": 1,
    "attention": None,
    "engine": "local",
    "actors": 2,
    "methods": [ALL],
    "sweep": [],
    "dataset": None,
    "data": [],
    "choices": None,
    "limit": None,
    "max_new_tokens": 256,
    "set": {},
    "count_passes": OURS,
    "best": TIMED,
    "weights": {},
    "exact": False,
    "repeats": 1,
    "near_tie": 1e-3,
    "modelled": None,
    "out": "failfast-bench",
    "scores": True,
    "figures": True,
}
"""What flags and the file of `--config` may say; the file's `options` is a mapping for `--set`."""
MODELS = ("target", "drafter", "ar_drafter")
LISTS = ("dataset", "methods", "sweep", "data")
KINDS: dict[str, type] = {name: str for name in (*MODELS, "dtype", "attention", "modelled")}
KINDS |= {"limit": int, "choices": str, "dataset": list}
"""Of values whose default is None."""
ENTRIES: dict[str, dict[str, type]] = {
    "methods": {"method": str, "label": str, "options": dict, "sweep": dict},
    "dataset": {"name": str, "data": str, "limit": int, "template": str, "choices": str},
}
"""Of mappings in lists."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, whose defaults are None: `merged` puts `--config` and `DEFAULTS` behind them."""
    whole = parser.add_mutually_exclusive_group()
    whole.add_argument("--config", metavar="FILE", type=user_path, help="YAML with the long names below as keys")
    whole.add_argument("--preset", choices=PRESETS, help="such a file that comes with the package")
    what = parser.add_argument_group("what")
    what.add_argument("--dataset", metavar="D", action="append", help=f"{', '.join(SOURCES)}, or a file of prompts")
    what.add_argument(
        "--data",
        metavar="[D=]FILE",
        action="append",
        help="JSONL, JSON or Parquet with the rows of dataset D, instead of its package or the Hub",
    )
    what.add_argument(
        "--choices", choices=CHOICES, help="order of GPQA's answers: its own for each question, or A correct"
    )
    what.add_argument("--limit", metavar="n", type=int, help="first n rows of each dataset")
    what.add_argument(
        "--methods",
        metavar="a,b",
        help=f"method or method:key=value,...; of {', '.join(METHODS)}, fast-dllm+ (its length swept), or all; or "
        "rows of the file by label, ROW or ROW:key=value,...",
    )
    what.add_argument(
        "--sweep",
        metavar="a:b",
        action="append",
        help="draft lengths of ar and fast-dllm+, the best per dataset is reported; or method:key=v1|v2|... (of a row "
        "of the file: ROW:key=...), with other options in front of the key: method:key=value,key=v1|v2",
    )
    what.add_argument("--max-new-tokens", metavar="n", type=int)
    what.add_argument(
        "--set",
        metavar="key=value",
        nargs="+",
        action="extend",
        help=f"for all methods, or with ROW:key=value for a row: {', '.join(option_names())}",
    )
    what.add_argument("--repeats", metavar="n", type=int, help="answers a question and method")
    models = parser.add_argument_group("models", "without any of them, the default pair")
    models.add_argument("--target", metavar="P", help="none: the default pair's, whatever the file says")
    models.add_argument("--drafter", metavar="P", help="for the methods that draft by diffusion")
    models.add_argument("--ar-drafter", metavar="P", help="for the methods that draft token by token")
    models.add_argument("--dtype", choices=DTYPES, help="of the weights")
    models.add_argument("--tensor-parallel", metavar="n", type=int, help="devices that share each layer")
    models.add_argument("--attention", choices=KERNELS, help="kernel of cached attention")
    _add_places(models)
    _add_results(parser.add_argument_group("result"))


def _add_results(result: Any) -> None:
    """Flags that say what is written and how it is counted."""
    result.add_argument("--out", metavar="DIR", help=f"an interrupted run continues there ({DEFAULTS['out']})")
    result.add_argument(
        "--count-passes",
        choices=(OURS, RELEASED),
        help="drafter passes: as they are made, or as the authors' released code would make and count them",
    )
    result.add_argument("--best", choices=BEST, help="by which speedup the best point of a sweep is picked")
    result.add_argument("--near-tie", metavar="x", type=float, help="logit gap that excuses another token")
    result.add_argument("--exact", action="store_true", default=None, help="bit-identical outputs: nothing is excused")
    result.add_argument(
        "--modelled", metavar="X", help="latencies of the modelled speedup: 7B, 14B, 32B or DRAFT:TARGET"
    )
    for name, said in (("scores", "is each answer right?"), ("figures", "PNG and SVG")):
        result.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=said)
    result.add_argument("--redraw", action="store_true", help="only draw the figures of --out again, from its records")


def read_config(path: Path) -> dict[str, Any]:
    """The YAML file of `--config`.

    Raises:
      ValueError: it cannot be read, is no mapping or has an unknown key; the message names file and key.
    """
    yaml = import_optional("yaml", "--config")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a mapping")
    config = {}
    for key, value in found.items():
        name = {"datasets": "dataset", "options": "set"}.get(key, str(key).replace("-", "_"))
        if name not in DEFAULTS:
            raise ValueError(f"{path}: unknown key {key!r} (keys: {', '.join(DEFAULTS)}, datasets, options)")
        if name in LISTS and not isinstance(value, list):
            value = [value]
        default = DEFAULTS[name]
        check_kinds(str(path), {key: value}, {key: KINDS.get(name, type(default))}, needed=default is not None)
        for entry in value if name in LISTS else ():
            if not isinstance(entry, str) and name in ENTRIES:
                check_kinds(f"{path}: {key}", entry, ENTRIES[name])
            elif not isinstance(entry, str):
                raise ValueError(f"{path}: {key}: {entry!r} must be text")
        config[name] = value
    for name in config.get("set") or {}:
        check_option(f"{path}: options", name)
    return config


def check_kinds(where: str, entry: Any, kinds: Mapping[str, type], needed: bool = False) -> None:
    """Checks a mapping of a file against the types that its keys may have; without `needed`, None is fine, too.

    Raises:
      ValueError: it is none, or has a value of another type or an unknown key; the message begins with `where`.
    """
    if not isinstance(entry, Mapping) or entry.keys() - kinds.keys():
        raise ValueError(f"{where}: {entry!r} must be text, or have the keys {', '.join(kinds)}")
    for key, value in entry.items():
        kind = (int, float) if kinds[key] is float else kinds[key]
        right = isinstance(value, kind) and (kinds[key] is bool or not isinstance(value, bool))
        if not right and (needed or value is not None):
            raise ValueError(f"{where}: {key} {value!r}: must be of type {kinds[key].__name__}")
        if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where}: {key} {value!r}: its keys must be text")


def _add_places(group: Any) -> None:
    """Flags that say how many engines there are, and of how many processes."""
    group.add_argument("--engine", choices=("local", "ray"), help="ray: questions are shared out among actors")
    group.add_argument("--actors", metavar="n", type=int, help="engines of --engine ray (2)")
    processes.add_flag(group)


def merged(args: argparse.Namespace) -> argparse.Namespace:
    """Flags over the file of `--config` over defaults."""
    given = {name: value for name, value in vars(args).items() if name in DEFAULTS and value is not None}
    given |= {name: None for name in MODELS if given.get(name) == "none"}
    config = PRESETS.get(args.preset, args.config)
    base = DEFAULTS | (read_config(config) if config is not None else {})
    rows: dict[str, list[str]] = {}
    if "methods" in given:
        given["methods"] = split_methods(given["methods"])
    if "dataset" in given:
        given["dataset"] = [name for text in given["dataset"] for name in question_sets.names_of(text)]
    if "set" in given:
        of_rows = [text for text in given["set"] if ":" in text.partition("=")[0]]
        for row, _, text in (text.partition(":") for text in of_rows):
            rows.setdefault(row, []).append(text)
        given["set"] = base["set"] | parse_options("--set", [text for text in given["set"] if text not in of_rows])
    labels = {entry["label"]: entry for entry in base["methods"] if isinstance(entry, Mapping) and entry.get("label")}
    if "methods" in given:
        given["methods"] = [row_named(text, labels, args.preset or config) for text in given["methods"]]
    if labels and "sweep" in given:
        swept = [sweep_named(text, labels) for text in given["sweep"]]
        given["methods"] = [*given.get("methods", base["methods"]), *(entry for entry in swept if entry)]
        given["sweep"] = [text for text, entry in zip(given["sweep"], swept) if not entry]
    if "dataset" in given:
        named = {entry.get("name"): entry for entry in base["dataset"] or () if isinstance(entry, Mapping)}
        given["dataset"] = [named.get(text, text) for text in given["dataset"]]
    found = base | given | {"rows": rows}
    if found["exact"]:
        found["set"] = {**found["set"], "exact": True}
    return argparse.Namespace(**found)


def around_row(row: str, entry: Mapping[str, Any], shown: str, texts: str) -> dict[str, Any]:
    """A row of the file with other options, `key=value,...`; none leaves one out.

    Raises:
      ValueError: no such option of the row's method; the message begins with `shown`.
    """
    given = parse_options(shown, texts.split(",") if texts else (), entry.get("method"))
    swept = {key: values for key, values in (entry.get("sweep") or {}).items() if key not in given}
    spelled = ",".join(f"{key}={value}" for key, value in given.items() if value is not None)
    changed = {**entry, "label": f"{row}:{spelled}" if spelled else row, "of": row, "given": given, "sweep": swept}
    return changed if swept else {key: value for key, value in changed.items() if key != "sweep"}


def row_named(text: str, rows: Mapping[str, Mapping[str, Any]], file: Path | str | None) -> Any:
    """What an entry of `--methods` means beside a file's rows: a row, `ROW:key=value,...` a row with other options, or
    else the text itself.

    Raises:
      ValueError: neither a row nor a method; the message names the rows.
    """
    row, _, options = text.partition(":")
    if row not in rows:
        if rows and row not in (*METHODS, *SWEPT, ALL):
            raise ValueError(f"--methods {text}: there is no such row; rows of {file}: {', '.join(rows)}")
        return text
    return around_row(row, rows[row], f"--methods {text}", options) if options else rows[row]


def sweep_named(text: str, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The entry that `--sweep ROW:key=values` means, points around a file's row; None for other sweeps.

    Raises:
      ValueError: no such option of the row's method.
    """
    row, options, key, values = split_sweep(text)
    if row not in rows:
        return None
    shown = f"--sweep {text}"
    entry = around_row(row, rows[row], shown, options)
    check_option(shown, key, entry["method"])
    found = {"label": f"{row}:{key}", "start": entry["label"], "sweep": {key: sweep_values(shown, values)}}
    return entry | found


def read_datasets(
    named: Sequence[str | Mapping[str, Any]],
    data: Sequence[str | Path] = (),
    *,
    limit: int | None = None,
    choices: str | None = None,
) -> list[Dataset]:
    """Datasets by `--dataset`: names, or mappings with `name`, `data`, `limit`, `template` and `choices`.

    Args:
      named: the datasets.
      data: `--data`: files of rows, `D=FILE`, or one for the only dataset.
      limit: first questions of each, where a mapping does not say.
      choices: `--choices`: the order of GPQA's answers.

    Raises:
      ValueError, OSError: an unknown or repeated dataset, or rows that cannot be had; the message names them, all that
        cannot be fetched at once.
    """
    if not named:
        raise ValueError(f"--dataset: name one of {', '.join(SOURCES)}, or a file of prompts")
    files = question_sets.files_of(data)
    if None in files and len(named) > 1:
        raise ValueError(f"--data {files[None]}: of which dataset? Write --data D={files[None]}")
    datasets: dict[str, Dataset] = {}
    unreachable: list[question_sets.UnreachableError] = []
    for entry in named:
        entry = {"name": entry} if isinstance(entry, str) else entry
        known = ("name", "data", "limit", "template", "choices")
        if not isinstance(entry, Mapping) or "name" not in entry or entry.keys() - {*known}:
            raise ValueError(f"datasets: {entry!r} must be a name, or have the keys {', '.join(known)}")
        name = str(entry["name"])
        rows = entry.get("data") or files.pop(name, None) or files.pop(None, None)
        if type(most := entry.get("limit", limit)) not in (int, type(None)):
            raise ValueError(f"datasets: limit of {name}: must be an integer, got {most!r}")
        try:
            dataset = load_dataset(
                name,
                data=user_path(rows) if rows is not None else None,
                limit=most,
                template=entry.get("template"),
                choices=choices if name == "gpqa" and choices else entry.get("choices"),
            )
        except question_sets.UnreachableError as error:
            unreachable.append(error)
            continue
        if dataset.name in datasets:
            raise ValueError(f"--dataset {name}: named twice")
        datasets[dataset.name] = dataset
    if unreachable:
        raise ValueError("\n".join(map(str, unreachable))) from unreachable[0]
    if choices and "gpqa" not in datasets:
        raise ValueError(f"--choices {choices}: --dataset does not name gpqa")
    if files:
        raise ValueError(f"--data {next(iter(files))}={next(iter(files.values()))}: --dataset does not name it")
    return list(datasets.values())


def for_size(options: Mapping[str, Any], target: str | None, shown: str) -> dict[str, Any]:
    """Options, those with a value for each size of the target (`{7B: 0.5, other: 0.45}`) resolved.

    Raises:
      ValueError: there is no value for this target; the message names the option and the sizes.
    """
    found = re.findall(r"(?<![\d.])(\d+(?:\.\d+)?B)(?![a-z])", str(target), re.IGNORECASE)
    size = found[-1].upper() if found else None
    resolved = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            if size not in value and "other" not in value:
                known = ", ".join(map(str, value))
                said = f"known for {known}; this target: {target} (--set ROW:{name}=..., or leave the row out)"
                raise ValueError(f"{shown}: {name}: {said}")
            value = value.get(size, value.get("other"))
        resolved[name] = value
    return resolved


def read_entry(
    entry: Any, target: str | None = None, given: Mapping[str, Any] | None = None, lengths: str | None = None
) -> list[Variant]:
    """The variant, or the points of the sweeps, of a mapping in the file's `methods`.

    Args:
      entry: as in the file; or a row of it changed by `around_row` or `sweep_named`.
      given: options by `--set ROW:...`, instead of the file's.
      lengths: `--sweep FIRST:LAST`, instead of the file's draft lengths of `ar` and `fast-dllm`.
    """
    if not isinstance(entry, Mapping) or entry.keys() - {*ENTRIES["methods"], "of", "given", "start"}:
        raise ValueError(f"methods: {entry!r} must be text, or have the keys method, label, options, sweep")
    method, shown = str(entry.get("method")), f"methods: {entry!r}"
    label = entry.get("label")
    options = {**(entry.get("options") or {}), **(given or {}), **entry.get("given", {})}
    options = for_size(options, target, label or shown)
    if "sweep" not in entry:
        return [make_variant(method, options, label, shown=shown)]
    if not isinstance(entry["sweep"], Mapping) or not entry["sweep"]:
        raise ValueError(f"{shown}: sweep must map an option to its values, got {entry['sweep']!r}")
    points = []
    for key, values in entry["sweep"].items():
        if lengths is not None and method in SWEPT.values() and key == "spec_len" and "start" not in entry:
            values, shown = lengths, f"--sweep {lengths}"
        if not isinstance(values, (str, list)):
            raise ValueError(f'{shown}: values of a sweep must be a list, or a range in quotes like "3:20"')
        values = sweep_values(shown, values) if isinstance(values, str) else values
        name = label if label and len(entry["sweep"]) == 1 else f"{label or method}:{key}"
        points += sweep(name, method, key, values, options, shown=shown, row=entry.get("start"))
    return points


def labels_of(args: argparse.Namespace) -> list[str]:
    """What rows are called in `--set ROW:key=value`."""
    return [str(entry.get("label")) if isinstance(entry, Mapping) else str(entry) for entry in args.methods]


def row_options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """`--set ROW:key=value` by row.

    Raises:
      ValueError: no such option of the row's method.
    """
    methods = {text: text for text in args.methods if isinstance(text, str) and text in METHODS}
    entries = [entry for entry in args.methods if isinstance(entry, Mapping)]
    methods |= {entry.get("of", entry.get("label")): entry.get("method") for entry in entries}
    return {row: parse_options(f"--set {row}", texts, methods.get(row)) for row, texts in args.rows.items()}


def read_variants(args: argparse.Namespace) -> tuple[list[Variant], set[str]]:
    """Variants (sweeps' points among them), and the labels that only `all` asked for.

    Raises:
      ValueError: an unknown method or option; the message names the flag or the file's entry.
    """
    lengths = next((text for text in args.sweep if "=" not in text), None)
    overrides, used = row_options(args), set()
    texts = [entry for entry in args.methods if isinstance(entry, str) and entry != ALL]
    named = [variant for text in texts for variant in parse_method(text, lengths)]
    for entry in args.methods:
        if not isinstance(entry, str):
            row = entry.get("of", entry.get("label")) if isinstance(entry, Mapping) else None
            named += read_entry(entry, args.target, overrides.get(row), lengths)
            used.add(row)
    overrides = {row: options for row, options in overrides.items() if row not in used}
    named = [dataclasses.replace(v, options={**v.options, **overrides.pop(v.label, {})}) for v in named]
    if overrides:
        raise ValueError(f"--set {next(iter(overrides))}:...: there is no such row; rows: {', '.join(labels_of(args))}")
    named += [variant for text in args.sweep if "=" in text for variant in parse_sweep(text)]
    rest = []
    if ALL in args.methods:
        others = [*METHODS, *(name for name in SWEPT if lengths is not None and name not in METHODS)]
        rest = [v for name in others if name not in (*texts, BASELINE) for v in parse_method(name, lengths)]
    swept = [v for v in (*named, *rest) if v.sweep and v.method in SWEPT.values() and "spec_len" in v.options]
    if lengths is not None and not swept:
        raise ValueError(f"--sweep {lengths}: is for {' and '.join(SWEPT)}; --methods names neither")
    variants = check_labels([*named, *rest])
    if not variants:
        raise ValueError(f"--methods: {BASELINE} is what others are compared with, and always runs; name one beside it")
    return variants, {v.label for v in rest} - {v.label for v in named}
