"""The paper's models in miniature, for its commands: `python tests/paper_models.py FOLDER` writes them.

The target is a golden model of nine layers; its autoregressive drafter is the same with some noise on its weights, its
block-diffusion drafter the same in Fast-dLLM v2's layout, both surer of themselves; its EAGLE-3 drafter is golden, too.
What they write is noise. Beside them lie questions, and conversations to train on.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import yaml
from checkpoint_files import GOLDEN, hf_folder
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from failfast_jax.bench.run_config import PRESETS

FIELD = GOLDEN / "field"
TARGET, AR, DIFFUSION, EAGLE = "Qwen2.5-32B-Instruct", "Qwen2.5-1.5B-Instruct", "Fast_dLLM_v2_1.5B", "EAGLE3"
"""Folders of the models."""
MASK = 129
"""Behind the tokenizer's 129 tokens; 130 is the stop token."""
MATH = ["What is 2 + 3?", "What is 11 + 7?", "What is 7 + 9?"]
GSM8K = ["How much is 5 + 8?", "How much is 6 + 1?"]
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """129 pieces of the preset's prompts."""
    texts = [entry["template"] for entry in yaml.safe_load(PRESETS["failfast-paper"].read_text())["datasets"]]
    texts += MATH + GSM8K
    pieces = Tokenizer(models.BPE(unk_token="?"))
    pieces.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_next")
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=MASK, special_tokens=["?", "</s>"]))
    assert pieces.get_vocab_size() == MASK
    return PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="?", eos_token="</s>", chat_template=CHAT)


def write_models(folder: Path) -> None:
    """Target and drafters."""
    for copied in (TARGET, AR):
        shutil.copytree(FIELD / "llama_e", folder / copied)
        tokenizer().save_pretrained(folder / copied)
    shutil.copytree(FIELD / "eagle3_llama_e", folder / EAGLE)
    rng, tensors = np.random.default_rng(0), load_file(folder / AR / "model.safetensors")
    sure = {"model.norm.weight": 3 * tensors["model.norm.weight"]}
    noisy = {name: (t * (1 + 0.1 * rng.standard_normal(t.shape))).astype(t.dtype) for name, t in tensors.items()}
    save_file(noisy | sure, folder / AR / "model.safetensors")

    config = json.loads((folder / TARGET / "config.json").read_text())
    same = {name: config[name] for name in config if name not in ("architectures", "model_type", "head_dim")}
    sizes = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    biases = {
        f"model.layers.{layer}.self_attn.{part}_proj.bias": np.zeros(heads * config["head_dim"], np.float32)
        for layer in range(config["num_hidden_layers"])
        for part, heads in sizes.items()
    }
    diffusion = folder / DIFFUSION
    same["layer_types"] = ["full_attention"] * config["num_hidden_layers"]  # the golden model has fewer
    hf_folder(diffusion, "fast_dllm_v2_tied", tensors | biases | sure, **same, bd_size=32, mask_token_id=MASK)
    tokenizer().save_pretrained(diffusion)


def write_rows(folder: Path) -> None:
    """A file for each data set, by its name, and `chat`: conversations."""
    article = "Please reason step by step, separate logical reasoning steps, and put your final answer. " * 8
    rows = {
        "math500": [{"problem": text, "answer": "5", "unique_id": f"q{number}"} for number, text in enumerate(MATH)],
        "gsm8k": [{"question": text, "answer": "#### 7"} for text in GSM8K],
        "chat": [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{number} {article}"}]}
            for number in range(6)
            for text in MATH + GSM8K
        ],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    write_models(folder)
    write_rows(folder)
    print(*sorted(path.name for path in folder.iterdir()))
