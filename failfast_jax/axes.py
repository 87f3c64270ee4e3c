"""Meanings of the axis letters in type annotations such as `Float[Array, "B W K H"]`, the same in every module.

Of a batch of text:
  B     sequences
  L     positions of whole sequences, from 0 on
  T     tokens that a sequence's buffer holds: its capacity and the widest window
  P     tokens of the prompts' buffer
  Z     stop tokens
  W     rows of a window: positions that one pass computes
  S     slots of the cache: its capacity
  A     anchors: places of a text where a block is trained
  F     target layers that a drafter reads (features)

Of a model:
  E     residual stream (hidden size)
  V     vocabulary; v: draft vocabulary
  K     KV heads; K1: those of a cache, which may hold several layers' one after the other
  G     query heads of a KV head; G2: these, its key and its value, as one projection makes them
  Q     query heads: K * G
  H     head dimension; h: half of it, the angles of rotary embeddings
  I, O  inputs and outputs of a linear layer

Of a draft:
  R     rows of a drafter's block, or of the outputs of a pass
  D     block size of a block-causal model; d: its small block
  M     longest draft; M1: M + 1, with the last committed token
  N     drafted positions of one step: a chunk
  n     nodes of a tree
  U     vocabulary of a draft's distributions

`*R` (or another starred letter) is any number of leading axes, `_` an axis of any size, `1` an axis to broadcast. A
word is an axis of one function or class, which explains it.
"""

from jaxtyping import Array, Float, Int

Queries = Float[Array, "B W Q H"]
Cache = Float[Array, "B K1 S H"]
"""Rotated keys, or values, of a layer, or of all."""
PerSequence = Int[Array, " B"]
Scalar = Int[Array, ""]
