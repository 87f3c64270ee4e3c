"""Attention of a window of queries over a static cache: Pallas kernels for TPU and GPU, LLVM for CPU, and plain jnp.

One interface, `window_attention(..., k_cache, v_cache, start, until, live, *, block_size)`:

- Query w of sequence b stands at position `start[b] + w`. The window's own keys and values are in the cache already.
- It sees key j iff `j <= max(visible_until(start[b] + w, block_size), until[b])`; `until` 0 leaves the mask rule alone.
- A key and value that are not finite lie in the cache as `reference.contained` has them: rows that see them get NaN.
- `live` is the number of leading positions that any query may see; tiles of the cache beyond it are not read.
- Tiles lie at absolute positions and are summed in a fixed order with an online float32 softmax: a row's result depends
  neither on where its window began nor on `live` nor on what lies behind it.

`cpu`, `gpu` and `reference.window_attention` take rotated queries `[B, W, Q, H]`, `tpu.window_attention` the
fused projection before rotation. Wide windows are served by `gpu.dense_window_attention`, `tpu_prompt.attention` and
`cpu_prompt.attend`. `cpu_prompt.attend` and `tpu.attend` take the fused projection and write the window's keys and
values themselves; `tpu_write.write_window` does nothing else.
Each module of kernels has `supports(...)`, which says why it cannot serve a shape; `MAX_WIDTH` is the widest window
that `cpu`, `gpu` and `tpu.window_attention` serve. `models.attention.supports` asks them before a model is read.

`cpu_product` multiplies the few rows of a decode pass by a matrix, and `cpu_norm` norms rows; `llvm_emitter` and
`thread_pool` are what the CPU's kernels are written with.
"""
