"""Odd tokenizers, templates, prompts and small files, for `fuzzing`: each case takes a generator and uses one input."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_files import GOLDEN, byte_level_alphabet
from tiny_engines import new_engine
from tiny_models import VOCAB

Change = Callable[..., Any]

CAPACITY, BLOCK = 40, 8
"""Most tokens of `Prompts`, and the drafter's block."""
TEXTS = (
    "a",
    "",
    " ",
    "\n",
    "é",
    "e\u0301",
    "\U0001f600",
    "\u202e right to left",
    "\u0000",
    "\ufeffa",
    "\ufffd",
    "\u200b",
)
TEXTS += ("\ud83d", "a\udcff", "x" * 3000, "\u1100\u1161" * 50, "<|end|>", "{{ 7 }}", "a\u0300" * 200, "\U000e0001")
TEMPLATES = (
    "{{ messages[0].content }}",
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "{% if add_generation_prompt %}>{% endif %}",
    "{{ raise_exception('no') }}",
    "{{ messages[9].content }}",
    "{{ nowhere.at.all }}",
    "{{ 1 // 0 }}",
    "{{ messages[0].content + 1 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 10**10**10 }}",
    "{{ 'x' * 20000000 }}",
    "{{ range(10**9) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}",
    "{{ messages | tojson }}",
    "{{ '%99999999d' % 1 }}",
    "{% endfor %}",
    "{{",
    "<|end|>",
)
FILES = {
    "tokenizer.json": 5,
    "tokenizer_config.json": 3,
    "special_tokens_map.json": 1,
    "added_tokens.json": 1,
}
"""Files of a tokenizer, by how often each is changed."""


def write_tokenizer(folder: Path, template: str = TEMPLATES[1]) -> None:
    """A byte-level tokenizer with a merge, a special token and a chat template, as Hugging Face folders have them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: id for id, token in enumerate([*sorted(byte_level_alphabet()), "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    written = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=template)
    written.save_pretrained(folder)
    if (folder / "chat_template.jinja").is_file():  # where older models have it: one file fewer, one more to change
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


class Tokenizers:
    """A tokenizer's folder with a file changed, mangled or missing, and whole ones with odd templates."""

    def __init__(self, folder: Path, changed: Change, mangled: Change):
        from failfast_jax.checkpoints.tokenizer import load_tokenizer

        self.folder, self.changed, self.mangled = folder / "tokenizer", changed, mangled
        self.folder.mkdir()
        write_tokenizer(self.folder)
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.load = load_tokenizer
        self.whole = load_tokenizer(self.folder)

    def files_changed(self, rng: random.Random) -> None:
        """Damaged, odd and missing files; what can be loaded encodes, and decodes what it encoded."""
        files = dict(self.files)
        if rng.random() < 0.3:  # those of older models
            files.pop("tokenizer.json")
        name = rng.choice([name for name in files for _ in range(FILES.get(name, 2))])
        way = rng.random()
        if way < 0.08:
            files.pop(name)
        elif way < 0.4 or not name.endswith(".json"):
            files[name] = self.mangled(rng, files[name], len(files[name]))
        else:
            files[name] = json.dumps(self.changed(rng, json.loads(files[name]))).encode()
        for path in self.folder.iterdir():
            path.unlink()
        for path, content in files.items():
            (self.folder / path).write_bytes(content)
        tokenizer = self.load(self.folder)
        if tokenizer is None:
            return
        from failfast_jax.prompts import encode

        ids = encode("ab, \u00e9<|end|>", tokenizer, 300, "the model", template=rng.random() < 0.5)
        assert isinstance(tokenizer.decode(ids, skip_special_tokens=True), str)

    def template(self, rng: random.Random) -> None:
        """Templates of which the most are no good, with messages of which some are."""
        from failfast_jax.prompts import encode

        text = "".join(rng.choice(TEMPLATES) for _ in range(rng.choice([1, 1, 2, 3])))
        if rng.random() < 0.2:
            text = self.mangled(rng, text.encode(), len(text)).decode("utf-8", "replace")
        self.whole.chat_template = rng.choice([text, text, text, text, {"default": text}, {"x": text}, 7, [text]])
        message = {"role": rng.choice(["user", "system", "x", ""]), "content": rng.choice(TEXTS)}
        text = message["content"]
        if rng.random() < 0.2:
            message = self.changed(rng, message)
        messages = [message] * rng.choice([1, 1, 3])
        ids = encode(rng.choice([messages, messages, text or "a"]), self.whole, 300, "the model")
        assert ids and all(0 <= token < 300 for token in ids)


SHORT = {"max_spec_len": 7}
WAYS = (
    {"method": "vanilla"},
    {"method": "lookup", **SHORT},
    {"method": "failfast", "spec_len": 3, **SHORT},
)
"""Methods that answer a prompt, without drafts and with them."""


class Prompts:
    """Prompts of every length and kind to an engine with little room, answered without loss."""

    def __init__(self) -> None:
        self.engine = new_engine(max_seq_len=CAPACITY)
        for way in WAYS:  # so that no input's time is a compiler's
            self.engine.generate([2, 3], max_new_tokens=2, **way)
        self.lengths = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CAPACITY - 1, CAPACITY, CAPACITY + 1, 500)

    def prompt(self, rng: random.Random) -> None:
        """Answered as `vanilla` does, or refused."""
        ids: Any = [rng.randrange(2, VOCAB) for _ in range(rng.choice(self.lengths))]
        if rng.random() < 0.15 and ids:
            ids[rng.randrange(len(ids))] = rng.choice([-1, VOCAB, 2**40, 1.5, None, "a", True, [], "\ud83d", {}])
        elif rng.random() < 0.3:
            ids = rng.choice([np.asarray(ids, np.int32), tuple(ids), np.asarray(ids, np.float64), [ids], [[ids]]])
        elif rng.random() < 0.1:
            ids = rng.choice([*TEXTS, None, 3, {"role": "user"}, [{"role": "user", "content": "a"}], [[]], b"ab"])
        room = rng.choice([1, 2, BLOCK, CAPACITY, CAPACITY, 10**6, 0, -1])
        options = {"max_new_tokens": room, "ignore_eos": rng.random() < 0.5, "temperature": rng.choice([0.0, 0.0, 0.9])}
        if rng.random() < 0.1:
            options[rng.choice(["temperature", "top_p", "top_k", "seed"])] = rng.choice([-1, float("nan"), 2**40, 0.5])
        vanilla, *drafting = WAYS
        drafted = self.engine.generate(ids, **rng.choice(drafting), **options)
        plain = self.engine.generate(ids, **vanilla, **options)
        for answer, other in zip(drafted, plain, strict=True):
            assert answer.output_ids == other.output_ids, (ids, options)
            room = CAPACITY - len(answer.prompt_ids)
            assert 1 <= len(answer.output_ids) <= min(options["max_new_tokens"], room), (ids, options)
            assert all(0 <= token < VOCAB for token in answer.output_ids)


class SmallFiles:
    """Files that commands take beside models: costs, prompts, records, and the YAML of `--config`."""

    def __init__(self, folder: Path, changed: Change, mangled: Change):
        self.folder, self.changed, self.mangled = folder / "small", changed, mangled
        self.folder.mkdir()
        (self.folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        self.rows = self.folder / "questions.jsonl"
        self.rows.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')

    def _written(self, rng: random.Random, name: str, content: Any) -> Path:
        text = json.dumps(self.changed(rng, content) if rng.random() < 0.8 else content).encode()
        if rng.random() < 0.2:
            text = self.mangled(rng, text, len(text))
        path = self.folder / name
        path.write_bytes(text)
        return path

    def costs(self, rng: random.Random) -> None:
        """`--costs`."""
        from failfast_jax.policy.cost_book import CostBook

        CostBook(self._written(rng, "costs.json", {"verify": {"1": 0.01, "8": 0.02}, "draft": 0.001}))

    def records(self, rng: random.Random) -> None:
        """A journal that somebody edited; what is there stays readable when a record is added."""
        from failfast_jax.bench.answer_log import AnswerLog

        place = {"dataset": "d", "question": "0", "repeat": 0, "setting": "lookup", "block": 0}
        head = {"kind": "run", "session": 0, "identity": {"target": "t"}, "machine": None}
        lines = [head, {"kind": "answer", **place}, {"kind": "score", **place, "text": "x", "right": True}]
        at = rng.randrange(len(lines))
        lines[at] = self.changed(rng, lines[at])
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if rng.random() < 0.3:
            text = self.mangled(rng, text, len(text))
        path = self.folder / "records.jsonl"
        path.write_bytes(text)
        before = AnswerLog(path, {"target": "t"})
        before.append({"kind": "answer", **place, "question": "1"})
        assert AnswerLog(path, {"target": "t"}).records == before.records

    def prompts(self, rng: random.Random) -> None:
        """A file of prompts, or of a dataset's rows, for `bench run`."""
        from failfast_jax.public_data.question_sets import load_dataset

        rows = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"turns": ["a", "b"]}, [1, 2], "a"]
        rows += [{"question": "1 + 1?", "answer": "#### 2"}]
        chosen = [self.changed(rng, row) if rng.random() < 0.5 else row for row in rng.choices(rows, k=2)]
        text = json.dumps(chosen) if rng.random() < 0.3 else "".join(json.dumps(row) + "\n" for row in chosen)
        path = self.folder / ("rows.json" if text.startswith("[{") else "rows.jsonl")
        path.write_bytes(self.mangled(rng, text.encode(), len(text)) if rng.random() < 0.2 else text.encode())
        if rng.random() < 0.5:
            load_dataset(rng.choice(["gsm8k", "mtbench", "gpqa", "math500"]), data=path)
        else:
            load_dataset(str(path))

    def config(self, rng: random.Random) -> None:
        """A YAML file of `bench run --config`, up to where models would be read."""
        import yaml

        from failfast_jax.bench import run_command
        from failfast_jax.bench.run_config import RunConfig

        prompts, odd = str(self.folder / "prompts.jsonl"), rng.random()
        row = {"method": "failfast", "label": "row", "options": {"tau": {"7B": 0.3, "other": 0.4}, "spec_len": 5}}
        row = rng.choice([row, {"method": "ar", "sweep": {"spec_len": "3:5"}}, "lookup", "failfast:tau=0.3"])
        files = rng.choice([prompts, {"name": "gsm8k", "data": str(self.rows), "template": "{problem}", "limit": 1}])
        whole = {
            **{"dataset": [self.changed(rng, files) if odd < 0.3 else files]},
            **{"methods": [self.changed(rng, row) if 0.3 < odd < 0.6 else row]},
            **{"limit": 1, "max_new_tokens": 8, "repeats": 1, "near_tie": 0.001, "exact": False},
            **{"options": {"temperature": 0.0}, "sweep": ["lookup:max_spec_len=3|7"]},
            **{"scores": False, "figures": False},
        }
        text = yaml.safe_dump(self.changed(rng, whole) if odd > 0.6 else whole).encode()
        if rng.random() < 0.25:
            text = self.mangled(rng, text, len(text))
        path = self.folder / "config.yaml"
        path.write_bytes(text)
        parser = argparse.ArgumentParser()
        run_command.add_arguments(parser)
        words = ["--config", str(path), "--out", str(self.folder / "out")]
        run_command.check(RunConfig.from_flags(parser.parse_args(words)))


class Drafters:
    """Configurations of drafters that read their target's features, changed."""

    def __init__(self, folder: Path, changed: Change):
        from failfast_jax import load_model

        field = GOLDEN / "field"
        self.changed, self.target = changed, load_model(field / "qwen3_a")
        self.sources = [field / name for name in ("dspark_qwen3_a", "dflash_qwen3_a", "eagle3_qwen3_a")]
        self.folders = [folder / source.name for source in self.sources]
        for source, written in zip(self.sources, self.folders):
            written.mkdir()
            (written / "model.safetensors").symlink_to(source / "model.safetensors")

    def config(self, rng: random.Random) -> None:
        """Read and bound to the target, or refused."""
        from failfast_jax.checkpoints.model_folder import read_pair

        at = rng.randrange(len(self.sources))
        raw = json.loads((self.sources[at] / "config.json").read_text())
        for _ in range(rng.choice([1, 1, 2])):
            raw = self.changed(rng, raw)
        (self.folders[at] / "config.json").write_text(json.dumps(raw))
        read_pair(self.target, self.folders[at])
