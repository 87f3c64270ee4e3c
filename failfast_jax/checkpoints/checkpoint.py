"""Loading models: which layout a file or folder has, its configuration, its tensors' headers, and its parameters."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from failfast_jax.checkpoints import orbax_folder, parameter_map, safetensors_file
from failfast_jax.checkpoints.config_file import read_settings
from failfast_jax.checkpoints.hub import resolve_source
from failfast_jax.checkpoints.packed_matrices import packed_matrices
from failfast_jax.checkpoints.parameter_map import AbstractModule, ParameterPart, StoredTensor, TensorTable
from failfast_jax.errors import CheckpointError, OptionError
from failfast_jax.kernels import row_operations
from failfast_jax.kernels.blocks import ACTIVATIONS, BlockMatrix, StoredMatrix, with_scales_for
from failfast_jax.models import config_keys, quantization, sharding
from failfast_jax.models.model_config import ModelConfig
from failfast_jax.models.transformer import Decoder
from failfast_jax.util.hardware import bytes_on_a_device, explain_out_of_memory, release_memory
from failfast_jax.util.progress import PATIENCE_S, progress_bar

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "float16")}
Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
Convert = Callable[[str, jax.Array], dict[str, jax.Array]]
READERS = 4
"""Parameters that are read at a time: one thread does not keep up with a fast disk."""


def load_model(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    quantize: str | None = None,
    activations: str | None = None,
    widen: bool = False,
    progress: bool | None = None,
) -> Decoder:
    """Loads a decoder; its attributes `config` and `logits` are what most callers want.

    The host holds at most the model and some parameters more (`READERS`; two while Orbax restores a converted folder);
    names and shapes are checked before any tensor is read.

    Args:
      path_or_hub_id: a Hugging Face folder (`config.json` and safetensors), a `.gguf` file, a folder
        written by `python -m convert...`, or a Hugging Face Hub id (from the cache when offline).
      dtype: float32, bfloat16 or float16; None is float32 on CPU and bfloat16 on TPU and GPU. On CPU, matrices that
        are stored in 16 bits stay so in a float32 model: the same arithmetic on half the memory.
      activations: arithmetic of matrices in blocks on a CPU, `int8` or `float32`; None: int8 where there is a kernel.
      quantize: one of `quantization.SCHEMES`; each matrix is rounded as soon as it has been read (those of a
        converted folder once all are there), so that the whole model need not fit.
      widen: turn matrices that are stored in blocks into floats, for training.
      progress: shows a progress bar on stderr; None: shows it after 2 seconds on a
        terminal, after a minute in a log file.

    Raises:
      CheckpointError: nothing loadable is there, or its tensors are missing, unexpected, mis-shaped,
        damaged, or pickled.
      ConfigError: the model's configuration cannot be served.
      OptionError: an unknown scheme or arithmetic.
      ValueError: an unknown dtype. (All errors above are ValueErrors, too.)
    """
    quantization.check(quantize)
    if activations not in (None, *ACTIVATIONS):
        raise OptionError(f"--activations {activations}: must be one of {', '.join(ACTIVATIONS)}")
    opened = open_checkpoint(path_or_hub_id)
    model = opened.load(as_dtype(dtype), quantize=quantize, widen=widen, progress=progress)
    return quantization.with_activations({"target": model}, activations)["target"]


def as_dtype(dtype: Any, platform: str | None = None) -> np.dtype:
    """A numpy dtype from a name, a numpy or a jax dtype; None is the platform's default (None: that of JAX's backend).

    Raises:
      ValueError: not one of float32, bfloat16, float16.
    """
    if dtype is None:
        return DTYPES["float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"]
    try:
        name = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported (supported: {', '.join(DTYPES)})")
    return DTYPES[name]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration and headers have been read, and whose parameters have not.

    Attributes:
      path: the file or folder.
      config: the model's configuration; for a full model it includes the stop tokens of `generation_config.json` and
        the mask token.
      raw_config: the Hugging Face `config.json`, or its equivalent for a GGUF file.
      table: the parameters that the tensors fill; None for a folder that Orbax reads.
      network: makes the module, given `dtype` and `rngs`; None: a `Decoder`.
      extra_shapes: shapes of parameters in the files that the module does not have.
      borrowed_parts: parts of the module that the files do not have.
    """

    path: Path
    config: ModelConfig
    raw_config: Mapping[str, Any]
    table: TensorTable | None
    tensors: Mapping[str, StoredTensor]
    network: Callable[..., Any] | None = None
    extra_shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    borrowed_parts: tuple[str, ...] = ()
    _abstract_modules: dict[np.dtype, AbstractModule] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def check(self) -> parameter_map.ReadPlan:
        """Matches tensors with parameters without reading any data; errors are those of `load_model`."""
        # Orbax has the parameters under their own names.
        table = self.table or TensorTable({name: ParameterPart(name) for name in self.shapes}, ignored="(?!)")
        return parameter_map.match_tensors(table, self.shapes, self.tensors, self.config, self.path)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter in the files, by its path; `check_layers` is asked first."""
        parameter_map.check_layers(self.tensors, self.config.num_layers, self.path)
        shapes = self.abstract_module(DTYPES["float32"]).shapes
        borrowed = [name for name in shapes if name.split(".")[0] in self.borrowed_parts]
        return {name: shape for name, shape in shapes.items() if name not in borrowed} | self.extra_shapes

    def abstract_module(self, dtype: Any) -> AbstractModule:
        """The module, without memory; tracing it takes a tenth of a second, once for each dtype."""
        network, key = self.network or functools.partial(Decoder, self.config), np.dtype(dtype)
        if key not in self._abstract_modules:
            self._abstract_modules[key] = AbstractModule.made_by(lambda rngs: network(dtype=dtype, rngs=rngs))
        return self._abstract_modules[key]

    def stored_dtype(self) -> np.dtype:
        """The narrowest supported dtype that holds every stored value."""
        stored = {tensor.dtype for tensor in self.tensors.values()}
        return stored.pop() if len(stored) == 1 and stored <= set(DTYPES.values()) else DTYPES["float32"]

    def has_blocks(self) -> bool:
        """True if a matrix is stored in blocks."""
        return any(tensor.read_blocks is not None for tensor in self.tensors.values())

    def stored_bytes(self) -> int:
        """Bytes of its files of weights."""
        places = {tensor.file for tensor in self.tensors.values()}
        files = (file for place in places for file in (place.rglob("*") if place.is_dir() else [place]))
        return sum(file.stat().st_size for file in files if file.is_file())

    def num_parameters(self) -> int:
        """Number of parameters, each entry counted."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def storage_dtypes(self, dtype: np.dtype) -> dict[str, np.dtype]:
        """The dtype in which a model in `dtype` holds each parameter; see `row_operations.storage_dtype`.

        Matrices of products may stay as stored.

        Raises:
          CheckpointError: names or shapes of tensors do not fit the model, or a converted folder is damaged.
        """
        kept, plan = {}, self.check()
        for name, shape in self.shapes.items():
            stored = {tensor.dtype for _, tensor in plan.sources[name]}
            keeps = len(stored) == 1 and (name in ("embed", "head") or name.endswith(".weight"))
            kept[name] = row_operations.storage_dtype(shape, *stored, dtype) if keeps else dtype
        return kept

    def load(
        self,
        dtype: np.dtype,
        *,
        place: Place | None = None,
        quantize: str | None = None,
        flag: str = "--quantize",
        widen: bool = False,
        progress: bool | None = None,
    ) -> Decoder:
        """Builds the decoder; see `load_model` and `read`. `flag` is that of `quantize`."""

        def convert(name: str, value: jax.Array | BlockMatrix) -> dict[str, Any]:
            return {name: quantization.convert(name, value, quantize)}

        most_bits = 0 if widen or self.has_blocks() else quantization.SCHEMES.get(quantize, 16)
        values = self.read(
            self.storage_dtypes(dtype),
            place=place,
            convert=convert,
            progress=progress,
            widen=widen,
            advised=[f"{flag} {scheme}" for scheme, bits in quantization.SCHEMES.items() if bits < most_bits],
        )
        model = self.abstract_module(dtype).filled(values).stacked()
        release_memory()
        return model

    def read(
        self,
        dtype: np.dtype | Mapping[str, np.dtype],
        *,
        place: Place | None = None,
        convert: Convert | None = None,
        progress: bool | None = None,
        widen: bool = True,
        advised: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Reads the parameters by their paths: several at a time, each process its devices' parts.

        Args:
          dtype: dtype of all parameters, or of each by its path.
          place: the sharding of a parameter, given its path and its shape; None: the default device.
          convert: the arrays that replace a parameter, given its path and itself; None: all parameters as they are.
          progress: see `load_model`, also for errors.
          widen: turn matrices that are stored in blocks into floats.
          advised: flags that save memory, `--quantize int8`.
        """
        dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(self.shapes, dtype)
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted, sizes, values, plan = {}, {}, {}, self.check()
        for name, shape in self.shapes.items():
            placed = default if place is None else place(name, shape)
            wanted[name] = jax.ShapeDtypeStruct(shape, dtypes[name], sharding=placed)
            parts = plan.sources[name] if plan.has_blocks(name) and not widen else ()
            sizes[name] = sum(tensor.stored_bytes for _, tensor in parts) or math.prod(shape) * dtypes[name].itemsize

        def layouts(_: int) -> dict[str, int]:
            models = {flag.split()[0]: wanted for flag in advised}
            smaller = quantization.smaller_layouts(models, bytes_on_a_device(wanted))
            return {flag: size for flag, size in smaller.items() if flag in advised}

        doing = f"{self.path}: {sum(sizes.values()) / 1e9:.2f} GB of parameters"
        with explain_out_of_memory(doing, layouts=layouts):
            files = self.table is not None
            for name, value in self._read_files(wanted, sizes, progress, widen) if files else self._read_orbax(wanted):
                values |= {name: value} if convert is None else convert(name, value)
        return values

    def _read_orbax(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
        restored = orbax_folder.load_params(self.path, self.tensors, wanted)
        for name in list(restored):
            yield name, restored.pop(name)

    def _read_files(
        self, wanted: Mapping[str, jax.ShapeDtypeStruct], sizes: Mapping[str, int], progress: bool | None, widen: bool
    ) -> Iterator[tuple[str, jax.Array | BlockMatrix]]:
        plan = self.check()

        def assemble(name: str) -> sharding.Blocks | BlockMatrix:
            array = wanted[name]
            if plan.has_blocks(name) and not widen:
                return _divisible(name, plan.assemble_blocks(name, array.shape), array)
            blocks = sharding.blocks_here(array.sharding, array.shape)
            return {block: plan.assemble(name, array.shape, array.dtype, block) for block in blocks}

        options = {"unit_scale": True, "delay": PATIENCE_S} | ({} if progress is None else {"disable": not progress})
        with progress_bar(f"reading {self.path.name}", "B", total=sum(sizes.values()), **options) as bar:
            for name, blocks in _prefetched(assemble, wanted):
                place = wanted[name].sharding
                if isinstance(blocks, BlockMatrix):
                    yield name, blocks.with_arrays(functools.partial(sharding.put, place=place))
                else:
                    # Waiting keeps host copies from piling up before a slow link to the device.
                    yield name, jax.block_until_ready(sharding.from_blocks(blocks, place, wanted[name].shape))
                bar.update(sizes[name])


def _divisible(name: str, matrix: StoredMatrix, array: jax.ShapeDtypeStruct) -> StoredMatrix:
    """A matrix in blocks that can be spread as `array` is; OptionError: its blocks cannot be divided so."""
    inputs = array.sharding.shard_shape(array.shape)[-1]
    if inputs == array.shape[-1]:
        return matrix
    try:
        return with_scales_for(matrix, inputs)
    except ValueError as error:
        devices = array.shape[-1] // inputs
        raise OptionError(f"--tensor-parallel {devices}: {name}: {error}; choose fewer devices") from error


def _prefetched(function: Callable[[str], Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields each name with the function's value, in order, while threads compute those of the next `READERS`."""
    with ThreadPoolExecutor(READERS) as pool:
        futures = ((name, pool.submit(function, name)) for name in names)
        waiting = collections.deque(itertools.islice(futures, READERS))
        try:
            while waiting:
                waiting.extend(itertools.islice(futures, 1))
                name, future = waiting.popleft()
                yield name, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def open_checkpoint(
    path_or_hub_id: str | os.PathLike[str], raw: dict[str, Any] | None = None, file: Any = None
) -> Checkpoint:
    """Finds a checkpoint; reads its headers and configuration (`raw`, `file`: a GGUF file, if read before), with
    `load_model`'s errors."""
    path = resolve_source(path_or_hub_id)
    if path.is_file():
        return _open_file(path, file)
    if path.name.endswith(orbax_folder.PARTIAL):
        raise CheckpointError(f"{path}: an unfinished conversion; run the conversion again")
    raw, config, packing = read_settings(path, raw)
    if (written := raw.get(orbax_folder.FORMAT_KEY)) is not None:
        if written != orbax_folder.FORMAT:
            read = orbax_folder.FORMAT
            raise CheckpointError(
                f"{path}: converted to format {written!r}, and this version reads {read}; convert the model again"
            )
        return Checkpoint(path, config, raw, None, orbax_folder.stored_params(path))
    integers = {} if packing is None else safetensors_file.INTEGERS
    tensors = safetensors_file.folder_tensors(path, safetensors_file.DTYPES | integers)
    tensors = safetensors_file.as_saved(tensors, path)
    if packing is not None:
        tensors = packed_matrices(tensors, packing)
    if config.tie_embeddings and (head := tensors.get(safetensors_file.HEAD)) is not None:
        # As in transformers 5: a stored head overrides `tie_word_embeddings`; a head without a stored embedding serves
        # as both.
        tied = tensors.setdefault(safetensors_file.EMBED, head) is head
        tensors = {name: tensor for name, tensor in tensors.items() if not tied or name != safetensors_file.HEAD}
        config, raw = dataclasses.replace(config, tie_embeddings=tied), raw | {"tie_word_embeddings": tied}
    return Checkpoint(path, config, raw, parameter_map.HF_TABLE, tensors)


def _open_file(path: Path, file: Any) -> Checkpoint:
    if path.suffix == ".gguf":
        from failfast_jax.checkpoints import gguf_file

        file = file or gguf_file.GGUFFile.open(path)
        raw = gguf_file.hf_config(file)
        table = gguf_file.GGUF_LLAMA_TABLE if raw["model_type"] == "llama" else gguf_file.GGUF_TABLE
        return Checkpoint(path, config_keys.read_model(raw, str(path)), raw, table, file.tensors)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: pass its folder, which must hold config.json, too")
    if path.suffix in safetensors_file.PICKLES:
        raise CheckpointError(f"{path}: pickled weights {safetensors_file.REFUSAL}")
    raise CheckpointError(f"{path}: not a folder and not a .gguf file")
