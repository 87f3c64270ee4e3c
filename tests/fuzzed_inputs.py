"""Odd tokenizers, templates, prompts and small files, for `fuzzing`: each case takes a generator and uses one input."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from checkpoint_files import GOLDEN, byte_level_alphabet
from fuzzed_formats import mangled, restructured
from tiny_engines import new_engine
from tiny_models import VOCAB

from failfast_jax import load_model
from failfast_jax.bench import run_command
from failfast_jax.bench.answer_log import AnswerLog
from failfast_jax.bench.run_config import RunConfig
from failfast_jax.checkpoints.model_folder import read_pair
from failfast_jax.checkpoints.tokenizer import load_tokenizer
from failfast_jax.policy.cost_book import CostBook
from failfast_jax.prompts import encode
from failfast_jax.public_data.question_sets import load_dataset

CAPACITY, BLOCK = 40, 8
"""Most tokens of `Prompts`, and the drafter's block."""
TEXTS = ("a", "", " ", "\n", "é", "e\u0301", "\U0001f600", "\u202e right to left", "\u0000", "\ufeffa", "\u200b")
TEXTS += ("\ud83d", "a\udcff", "x" * 3000, "\u1100\u1161" * 50, "<|end|>", "{{ 7 }}", "a\u0300" * 200, "\U000e0001")
TEMPLATES = (
    "{{ messages[0].content }}",
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "{% if add_generation_prompt %}>{% endif %}",
    "{{ raise_exception('no') }}",
    "{{ messages[9].content }}",
    "{{ messages[0].content + 1 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ messages | tojson }}",
    "{{ '%99999999d' % 1 }}",
    "{{",
    "<|end|>",
)
"""Parts of templates; `test_templates` has more that fail alone."""


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

    def __init__(self, folder: Path):
        self.folder = folder / "tokenizer"
        self.folder.mkdir()
        write_tokenizer(self.folder)
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.whole = load_tokenizer(self.folder)

    def files_changed(self, rng: random.Random) -> None:
        """Damaged, odd and missing files; what can be loaded encodes, and decodes what it encoded."""
        files = dict(self.files)
        if rng.random() < 0.3:  # those of older models
            files.pop("tokenizer.json")
        name = rng.choice([*files, "tokenizer.json", "tokenizer.json"])
        way = rng.random()
        if way < 0.08 or name not in files:
            files.pop(name, None)
        elif way < 0.4 or not name.endswith(".json"):
            files[name] = mangled(rng, files[name], 1.0)
        else:
            files[name] = json.dumps(restructured(rng, json.loads(files[name]))).encode()
        for path in self.folder.iterdir():
            path.unlink()
        for path, content in files.items():
            (self.folder / path).write_bytes(content)
        tokenizer = load_tokenizer(self.folder)
        if tokenizer is None:
            return
        ids = encode("ab, \u00e9<|end|>", tokenizer, 300, "the model", template=rng.random() < 0.5)
        assert isinstance(tokenizer.decode(ids, skip_special_tokens=True), str)

    def template(self, rng: random.Random) -> None:
        """Templates of which the most are no good, with messages of which some are."""
        text = "".join(rng.choice(TEMPLATES) for _ in range(rng.choice([1, 1, 2, 3])))
        text = mangled(rng, text.encode(), 0.2).decode("utf-8", "replace")
        self.whole.chat_template = rng.choice([text, text, text, text, {"default": text}, {"x": text}, 7, [text]])
        message = {"role": rng.choice(["user", "system", "x", ""]), "content": rng.choice(TEXTS)}
        text = message["content"]
        if rng.random() < 0.2:
            message = restructured(rng, message)
        messages = [message] * rng.choice([1, 1, 3])
        ids = encode(rng.choice([messages, messages, text or "a"]), self.whole, 300, "the model")
        assert ids and all(0 <= token < 300 for token in ids)


DRAFTS = {"method": "failfast", "spec_len": 3, "max_spec_len": 7}


class Prompts:
    """Prompts of every length and kind to an engine with little room, answered without loss."""

    def __init__(self) -> None:
        self.engine = new_engine(max_seq_len=CAPACITY)
        for options in ({"method": "vanilla"}, DRAFTS):  # so that no input's time is a compiler's
            self.engine.generate([2, 3], max_new_tokens=2, **options)
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
        drafted = self.engine.generate(ids, **DRAFTS, **options)
        plain = self.engine.generate(ids, method="vanilla", **options)
        for answer, other in zip(drafted, plain, strict=True):
            assert answer.output_ids == other.output_ids, (ids, options)
            room = CAPACITY - len(answer.prompt_ids)
            assert 1 <= len(answer.output_ids) <= min(options["max_new_tokens"], room), (ids, options)
            assert all(0 <= token < VOCAB for token in answer.output_ids)


class SmallFiles:
    """Files that commands take beside models: costs, prompts, records, and the YAML of `--config`."""

    def __init__(self, folder: Path):
        self.folder = folder / "small"
        self.folder.mkdir()
        (self.folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        self.rows = self.folder / "questions.jsonl"
        self.rows.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')

    def written(self, rng: random.Random, name: str, text: str) -> Path:
        """A file with this text, of which some bytes may be damaged."""
        path = self.folder / name
        path.write_bytes(mangled(rng, text.encode(), 0.2))
        return path

    def costs(self, rng: random.Random) -> None:
        """`--costs`."""
        costs = restructured(rng, {"verify": {"1": 0.01, "8": 0.02}, "draft": 0.001})
        CostBook(self.written(rng, "costs.json", json.dumps(costs)))

    def records(self, rng: random.Random) -> None:
        """A journal that somebody edited; what is there stays readable when a record is added."""
        place = {"dataset": "d", "question": "0", "repeat": 0, "setting": "lookup", "block": 0}
        head = {"kind": "run", "session": 0, "identity": {"target": "t"}, "machine": None}
        lines = [head, {"kind": "answer", **place}, {"kind": "score", **place, "text": "x", "right": True}]
        at = rng.randrange(len(lines))
        lines[at] = restructured(rng, lines[at])
        path = self.written(rng, "records.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        before = AnswerLog(path, {"target": "t"})
        before.append({"kind": "answer", **place, "question": "1"})
        assert AnswerLog(path, {"target": "t"}).by_kind == before.by_kind

    def prompts(self, rng: random.Random) -> None:
        """A file of prompts, or of a dataset's rows, for `bench run`."""
        rows = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"turns": ["a", "b"]}, [1, 2], "a"]
        rows += [{"question": "1 + 1?", "answer": "#### 2"}]
        chosen = [restructured(rng, row) if rng.random() < 0.5 else row for row in rng.choices(rows, k=2)]
        text = json.dumps(chosen) if rng.random() < 0.3 else "".join(json.dumps(row) + "\n" for row in chosen)
        path = self.written(rng, "rows.json" if text.startswith("[{") else "rows.jsonl", text)
        if rng.random() < 0.5:
            load_dataset(rng.choice(["gsm8k", "mtbench", "gpqa", "math500"]), data=path)
        else:
            load_dataset(str(path))

    def config(self, rng: random.Random) -> None:
        """A YAML file of `bench run --config`, up to where models would be read."""
        prompts = str(self.folder / "prompts.jsonl")
        row = {"method": "failfast", "label": "row", "options": {"tau": {"7B": 0.3, "other": 0.4}, "spec_len": 5}}
        row = rng.choice([row, {"method": "ar", "sweep": {"spec_len": "3:5"}}, "lookup", "failfast:tau=0.3"])
        files = rng.choice([prompts, {"name": "gsm8k", "data": str(self.rows), "template": "{problem}", "limit": 1}])
        whole = {"limit": 1, "max_new_tokens": 8, "repeats": 1, "near_tie": 0.001, "exact": False, "scores": False}
        whole |= {"options": {"temperature": 0.0}, "sweep": ["lookup:max_spec_len=3|7"], "figures": False}
        whole |= {"dataset": [files], "methods": [row]}
        path = self.written(rng, "config.yaml", yaml.safe_dump(restructured(rng, whole)))
        parser = argparse.ArgumentParser()
        run_command.add_arguments(parser)
        words = ["--config", str(path), "--out", str(self.folder / "out")]
        run_command.check(RunConfig.from_flags(parser.parse_args(words)))


class Drafters:
    """Configurations of drafters that read their target's features, changed."""

    def __init__(self, folder: Path):
        field = GOLDEN / "field"
        self.target = load_model(field / "qwen3_a")
        self.sources = [field / name for name in ("dspark_qwen3_a", "dflash_qwen3_a", "eagle3_qwen3_a")]
        self.folders = [folder / source.name for source in self.sources]
        for source, written in zip(self.sources, self.folders):
            written.mkdir()
            (written / "model.safetensors").symlink_to(source / "model.safetensors")

    def config(self, rng: random.Random) -> None:
        """Read and bound to the target, or refused."""
        at = rng.randrange(len(self.sources))
        raw = json.loads((self.sources[at] / "config.json").read_text())
        for _ in range(rng.choice([1, 1, 2])):
            raw = restructured(rng, raw)
        (self.folders[at] / "config.json").write_text(json.dumps(raw))
        read_pair(self.target, self.folders[at])
