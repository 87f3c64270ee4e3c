"""Kernels: attention of a window of queries over a static cache, products, and norms.

`kernel_table` lists every attention kernel and chooses one per pass. Each is a module with `attend(q, cache, window)`
and, if it has limits, `refusal(case)`. Rules for all of them, but `xla_attention` and `cudnn_attention` read the whole
capacity, and their sums are the library's:

- Query w of sequence b stands at position `start[b] + w`. The window's own keys and values are in the cache already
  (`tpu_attention` alone takes the fused projection and writes them by itself).
- It sees the slots that `attention_window.Window` says.
- A key and value that are not finite lie in the cache as `plain_attention.contained` has them: rows that see them get
  NaN.
- `live` is the number of leading positions that any query may see; tiles of the cache beyond it are not read.
- Tiles lie at absolute positions and are summed in a fixed order with an online float32 softmax: a row's result depends
  neither on where its window began nor on `live` nor on what follows it.

`row_operations` are products and norms; on a CPU `cpu_rows` serves the few rows of a decode pass. It
and `cpu_attention` call `cpu_kernels.c`, which `cpu_kernels` compiles for the processor at hand.
"""
