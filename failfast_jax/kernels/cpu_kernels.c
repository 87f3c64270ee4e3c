// The CPU's kernels: products, norms and attention of the few rows of a decode pass, and attention of prompts.
//
// `compile_cpu_kernels.py` makes LLVM text of this file, once per width of vector registers (LANES float32 numbers);
// `cpu_kernels.py` compiles that text for the processor at hand, and XLA calls the handlers at the end of this file
// through its FFI. Every function except the handlers and the NOINLINE ones is inlined, with constants for `type` and
// `rows`.
//
// A row's result never depends on the other rows: each sum has one order, whatever the number of rows or threads.

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

int sched_yield(void);

// `cpu_kernels.py` writes these into the text that it compiles, for one kernel at a time: loops unroll, branches go.
extern const long head_dim;                                // of attention
extern const long code_bits, group, outer, has_minimum;  // of products of blocks; `outer` is 0 where there is none

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define UNROLL _Pragma("clang loop unroll(full)")
// Runs CALL with N rows, a constant of 1 .. 8 that code is made for: `count` of them, but at most `most`.
#define WITH_ROWS(count, most, CALL)                                      \
  switch (min_of(count, most)) {                                           \
    CASE_OF(1, most, CALL) CASE_OF(2, most, CALL) CASE_OF(3, most, CALL)  \
    CASE_OF(4, most, CALL) CASE_OF(5, most, CALL) CASE_OF(6, most, CALL)  \
    CASE_OF(7, most, CALL) CASE_OF(8, most, CALL)                         \
  }
#define CASE_OF(ROWS, most, CALL) \
  case ROWS: if (ROWS <= most) { enum { N = ROWS }; CALL; } break;

typedef float floats __attribute__((ext_vector_type(LANES)));
typedef int32_t integers __attribute__((ext_vector_type(LANES)));
typedef uint32_t bits __attribute__((ext_vector_type(LANES)));
typedef float floats_at __attribute__((ext_vector_type(LANES), aligned(4)));
typedef uint16_t shorts_at __attribute__((ext_vector_type(LANES), aligned(2)));
typedef _Float16 halves_at __attribute__((ext_vector_type(LANES), aligned(2)));
typedef int8_t bytes_at __attribute__((ext_vector_type(LANES), aligned(1)));

// ------------------------------------------------------------------------------------------------ vectors

typedef enum { FLOAT32, BFLOAT16, FLOAT16, INT8 } Type;

INLINE long bytes_of(Type type) { return type == FLOAT32 ? 4 : type == INT8 ? 1 : 2; }

INLINE const void *element(const void *array, long index, Type type) {
  return (const char *)array + index * bytes_of(type);
}

// LANES numbers of a type as float32, which holds each exactly.
INLINE floats load(const void *at, Type type) {
  switch (type) {
    case BFLOAT16: {  // the upper half of a float32
      bits upper = __builtin_convertvector(*(const shorts_at *)at, bits) << 16;
      return (floats)upper;
    }
    case FLOAT16: return __builtin_convertvector(*(const halves_at *)at, floats);
    case INT8: return __builtin_convertvector(*(const bytes_at *)at, floats);
    default: return *(const floats_at *)at;
  }
}

// The first `count` numbers, fewer than LANES, and zeros.
INLINE floats load_some(const void *at, long count, Type type) {
  char numbers[4 * LANES] = {0};
  __builtin_memcpy(numbers, at, count * bytes_of(type));
  return load(numbers, type);
}

INLINE void store(float *at, floats value) { *(floats_at *)at = value; }

INLINE void store_some(float *at, long count, floats value) { __builtin_memcpy(at, &value, count * 4); }

INLINE floats fma_(floats a, floats b, floats c) { return __builtin_elementwise_fma(a, b, c); }

INLINE floats larger(floats a, floats b) { return b > a ? b : a; }  // a, where b is not a number

INLINE long min_of(long a, long b) { return a < b ? a : b; }

INLINE long max_of(long a, long b) { return a > b ? a : b; }

// Prefetches what lies `ahead` of the `size` bytes that are read now, into a core's second cache.
INLINE void prefetch(const void *at, long size, long ahead) {
  for (long offset = 0; offset < size; offset += 64) __builtin_prefetch((const char *)at + ahead + offset, 0, 2);
}

// One level of `sums`: adds the halves of each block of `size` lanes of `a`, then of `b`. Eight lanes, size 8 and 4:
//   a = a0 .. a7, b = b0 .. b7  ->  a0+a4 .. a3+a7, b0+b4 .. b3+b7  ->  a0+a4+a2+a6, a1+a5+a3+a7, the same of b, ...
INLINE floats halved(floats a, floats b, int size) {
  floats lower, upper;
  UNROLL
  for (int i = 0; i < LANES / 2; i++) {
    const int lane = 2 * i - i % (size / 2);  // each block's first half, of one block after the other
    lower[i] = a[lane], lower[LANES / 2 + i] = b[lane];
    upper[i] = a[lane + size / 2], upper[LANES / 2 + i] = b[lane + size / 2];
  }
  return lower + upper;
}

// The sum over the lanes of each of `count` vectors, in lanes 0 .. count-1 of the first (LANES of them per vector).
// `vectors` has room for a multiple of LANES. The order of a sum does not depend on the other vectors.
INLINE void sums(floats *vectors, int count) {
  UNROLL
  for (int begin = 0; begin < count; begin += LANES) {
    int some = count - begin < LANES ? count - begin : LANES;
    UNROLL
    for (int size = LANES; size > 1; size /= 2) {
      UNROLL
      for (int pair = 0; pair < (some + 1) / 2; pair++) {
        floats a = vectors[begin + 2 * pair], b = 2 * pair + 1 < some ? vectors[begin + 2 * pair + 1] : a;
        vectors[begin + pair] = halved(a, b, size);
      }
      some = (some + 1) / 2;
    }
    vectors[begin / LANES] = vectors[begin];
  }
}

INLINE float sum(floats vector) {
  sums(&vector, 1);
  return vector[0];
}

// The largest lane; no lane is NaN.
INLINE float largest(floats vector) { return __builtin_reduce_max(vector); }

// e to the power of each lane of x <= 0, to about one unit in the last place (Cephes' polynomial); below -87 as at -87.
INLINE floats exponential(floats x) {
  x = larger(x, (floats)-87.0f);
  floats turns = __builtin_elementwise_rint(x * 1.4426950408889634f);
  floats rest = fma_(turns, (floats)2.12194440e-4f, fma_(turns, (floats)-0.693359375f, x));
  floats series = (floats)1.9875691500e-4f;
  series = fma_(series, rest, (floats)1.3981999507e-3f);
  series = fma_(series, rest, (floats)8.3334519073e-3f);
  series = fma_(series, rest, (floats)4.1665795894e-2f);
  series = fma_(series, rest, (floats)1.6666665459e-1f);
  series = fma_(series, rest, (floats)5.0000001201e-1f);
  floats value = fma_(series, rest * rest, rest) + 1.0f;
  return (floats)((integers)value + (__builtin_convertvector(turns, integers) << 23));
}

// ------------------------------------------------------------------------------------------------ threads

typedef struct Job Job;
typedef void Work(long piece, const void *values);

struct Job {
  atomic_long next, done, holders;  // the next piece, how many are done, how many threads look at the job
  long count;
  Work *work;
  const void *values;  // on the caller's stack: read by a thread that has a piece, and the caller waits for that
};

INLINE void release(Job *job) {
  if (atomic_fetch_sub_explicit(&job->holders, 1, memory_order_acq_rel) == 1) free(job);
}

INLINE void take_pieces(Job *job) {
  long piece;
  while ((piece = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->count) {
    job->work(piece, job->values);
    atomic_fetch_add_explicit(&job->done, 1, memory_order_release);
  }
}

NOINLINE void run_helper(void *job) {
  take_pieces(job);
  release(job);
}

enum { PIECES_PER_HELPER = 4 };  // fewer pieces are not worth waking a thread

// True if a call of XLA's failed; frees the error.
INLINE int failed(XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args unused = {sizeof unused, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&unused);
  return 1;
}

// `for piece in range(count): work(piece, values)` on XLA's threads. The calling thread works too, and waits only for
// pieces under way: a helper that starts late finds no piece left. The last thread frees the job.
INLINE void parallel_for(XLA_FFI_CallFrame *frame, long count, Work *work, const void *values) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args asked = {sizeof asked, NULL, frame->ctx, &threads};
  if (failed(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&asked))) threads = 1;
  Job *job = threads > 1 ? malloc(sizeof(Job)) : NULL;
  if (!job) {
    for (long piece = 0; piece < count; piece++) work(piece, values);
    return;
  }
  const long helpers = min_of(threads - 1, count / PIECES_PER_HELPER);
  *job = (Job){0, 0, helpers + 1, count, work, values};
  XLA_FFI_ThreadPool_Schedule_Args request = {sizeof request, NULL, frame->ctx, run_helper, job};
  for (long helper = 0; helper < helpers; helper++)
    if (failed(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&request))) release(job);
  take_pieces(job);
  while (atomic_load_explicit(&job->done, memory_order_acquire) < count) sched_yield();
  release(job);
}

// ------------------------------------------------------------------------------------------------ products

enum {
  PIECE = 48,        // outputs of a piece of work
  AHEAD = 8192,      // bytes between what is read and what is prefetched
  TILE_ROWS = LANES == 8 ? 4 : 8,
  TILE_OUTPUTS = 3,  // rows and outputs of a tile, the fastest that were tried; `cpu_rows.LEAST_OUTPUTS`
  MAX_OUTPUTS = 4,  // of a tile of products or of scores
  MAX_SUMS = 24,    // of a tile: 8 rows x 3 outputs
};

typedef struct {
  const float *x;  // [rows, inputs]
  const void *w;   // [outputs, inputs]
  float *y;        // [rows, outputs]
  long rows, inputs, outputs;
} Product;

// Adds the products of `count` inputs, LANES or fewer, to the sums of `rows` rows and `width` outputs.
INLINE void add_products(const float *x, const void *w, floats *total, long inputs, long at, long count, int rows,
                         int width, Type type) {
  floats weights[MAX_OUTPUTS];
  UNROLL
  for (int output = 0; output < width; output++)
    weights[output] = load_some(element(w, output * inputs + at, type), count, type);
  UNROLL
  for (int row = 0; row < rows; row++) {
    const floats numbers = load_some(x + row * inputs + at, count, FLOAT32);
    UNROLL
    for (int output = 0; output < width; output++)
      total[row * width + output] = fma_(numbers, weights[output], total[row * width + output]);
  }
}

// `rows` rows of x times `width` outputs of w, summed in registers. Two rows and three outputs, LANES 16, 40 inputs:
// six vectors of sums over inputs 0..15, 16..31 and 32..39, then six totals over their lanes.
INLINE void tile(const float *x, const void *w, float *y, long inputs, long stride, int rows, int width, Type type) {
  floats total[MAX_SUMS + LANES];
  UNROLL
  for (int i = 0; i < rows * width; i++) total[i] = (floats)0.0f;
  const long turn = max_of(64 / bytes_of(type), LANES);  // a cache line of weights
  const long turns = inputs & -turn, whole = inputs & -(long)LANES;
  long at = 0;
  for (; at < turns; at += turn) {
    UNROLL
    for (int output = 0; output < width; output++)
      prefetch(element(w, output * inputs + at, type), turn * bytes_of(type), AHEAD);
    UNROLL
    for (long vector = 0; vector < turn; vector += LANES)
      add_products(x, w, total, inputs, at + vector, LANES, rows, width, type);
  }
  for (; at < whole; at += LANES) add_products(x, w, total, inputs, at, LANES, rows, width, type);
  if (at < inputs) add_products(x, w, total, inputs, at, inputs - at, rows, width, type);
  sums(total, rows * width);
  UNROLL
  for (int i = 0; i < rows * width; i++) y[i / width * stride + i % width] = total[i / LANES][i % LANES];
}

INLINE void outputs_of(long piece, const Product *p, Type type) {
  const long end = min_of((piece + 1) * PIECE, p->outputs);
  for (long row = 0; row < p->rows; row += TILE_ROWS)
    for (long output = piece * PIECE; output < end; output += TILE_OUTPUTS) {
      // The last tile overlaps the one before, perhaps another thread's: both write the same numbers.
      const long here = min_of(output, p->outputs - TILE_OUTPUTS);
      const float *x = p->x + row * p->inputs;
      const void *w = element(p->w, here * p->inputs, type);
      float *y = p->y + row * p->outputs + here;
      WITH_ROWS(p->rows - row, TILE_ROWS, tile(x, w, y, p->inputs, p->outputs, N, TILE_OUTPUTS, type))
    }
}

// ------------------------------------------------------------------------------------------------ products of blocks

// A weight in blocks holds whole numbers, `codes`, and a scale for each group of 16 or n * 32 inputs of an output.
// A tile is 16 outputs x 32 inputs; the tiles of 16 outputs lie one after the other. In a tile of 4 bits, byte
// [j][4 * output + i], j < 4, holds input 4 * j + i below and input 16 + 4 * j + i above; in one of 8 bits, j < 8, it
// is input 4 * j + i. Byte 70 of a tile of 4 bits is [1][4 * 1 + 2]: of output 1, input 6 below and input 22 above.
// So a vector holds four inputs of each of LANES outputs, which one instruction multiplies by the same four inputs of
// a row and adds up:
//   codes 3 0 15 7, scale 0.1, minimum -0.4; a row's 1 -2 4 0, scale 0.5  ->  0.1 * 0.5 * 63 - 0.4 * 0.5 * 3 = 2.55
enum {
  TILE = 16,
  INPUTS = 32,
  BLOCK_ROWS = LANES == 16 ? 8 : 4,  // rows that a tile is multiplied by at once
  TILES = 3,                         // of a piece of work
  ROUNDED_AT_ONCE = 2,               // rows of one
  BLOCKS_AHEAD = 4096,               // as AHEAD, of codes
};

typedef uint8_t codes_at __attribute__((ext_vector_type(4 * LANES), aligned(1)));
typedef uint8_t codes __attribute__((ext_vector_type(4 * LANES)));
typedef int32_t integers_at __attribute__((ext_vector_type(LANES), aligned(1)));
typedef char chars __attribute__((vector_size(4 * LANES)));  // as the compiler's names of instructions want them
typedef short shorts __attribute__((vector_size(4 * LANES)));
typedef int words __attribute__((vector_size(4 * LANES)));

typedef struct {
  const float *x;         // [rows, inputs]
  int8_t *rounded;        // [rows, inputs]: whole numbers of -127 .. 127, one scale for each 32
  float *row_scale;       // [rows, inputs / 32]
  int32_t *row_sum;       // [rows, inputs / 32, parts]: of the rounded inputs
  float *row_shift;       // the same times their scale: what a minimum is multiplied by
  const uint8_t *codes;   // [outputs / 16, inputs / 32, 16 * 16 or 32 * 16]
  const void *scale, *minimum;  // [outputs / 16, inputs / group, 16] float16, or int8 where there are outer ones
  const void *outer_scale, *outer_minimum;  // [outputs / 16, inputs / outer, 16] float16
  float *y;               // [rows, outputs]
  long rows, inputs, outputs;
} Blocks;

// Parts of a tile that are summed alone: its halves, where groups are of 16.
INLINE int parts_of_tile(void) { return group == 16 ? 2 : 1; }

// sum[lane] += weights[4 * lane + i] * x[i], i < 4. Weights are unsigned for AVX-512's instruction.
INLINE integers add_dot(integers sum, codes weights, int32_t x) {
  const integers four = (integers)x;
#if LANES == 16
  return (integers)__builtin_ia32_vpdpbusd512((words)sum, (chars)weights, (chars)four);
#elif LANES == 4
  const integers inputs = __builtin_convertvector(*(const bytes_at *)&x, integers);
  UNROLL
  for (int i = 0; i < 4; i++) sum += ((integers)weights << (24 - 8 * i) >> 24) * inputs[i];  // with their signs
  return sum;
#else
  // Sums of two products must fit in 16 bits: those of 4 bits do. Of signed 8 bits the sign goes to x.
  chars w = (chars)weights, inputs = (chars)four;
  if (code_bits == 8) inputs = __builtin_ia32_psignb256(inputs, w), w = __builtin_elementwise_abs(w);
  const shorts ones = (shorts)(integers)0x00010001;
  return sum + (integers)__builtin_ia32_pmaddwd256(__builtin_ia32_pmaddubsw256(w, inputs), ones);
#endif
}

// Rounds rows to int8: 32 inputs 0.5 -1.27 0 .. have the scale 0.01 and become 50 -127 0 ..
NOINLINE void round_rows(long piece, const void *values) {
  const Blocks *p = values;
  const long blocks = p->inputs / INPUTS, end = min_of((piece + 1) * ROUNDED_AT_ONCE, p->rows);
  for (long block = piece * ROUNDED_AT_ONCE * blocks; block < end * blocks; block++) {
    const float *x = p->x + block * INPUTS;
    floats high = (floats)0.0f, totals[LANES];  // of both halves; the third is NaN, if an input is not finite
    for (int i = 0; i < 3; i++) totals[i] = (floats)0.0f;
    UNROLL
    for (int i = 0; i < INPUTS; i += LANES) {
      const floats number = load(x + i, FLOAT32);
      high = larger(high, __builtin_elementwise_abs(number));
      totals[2] += number - number;
    }
    const float peak = largest(high), inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
    UNROLL
    for (int i = 0; i < INPUTS; i += LANES) {
      floats number = __builtin_elementwise_rint(load(x + i, FLOAT32) * inverse);
      number = ((number >= -127.0f) & (number <= 127.0f)) ? number : (floats)0.0f;
      *(bytes_at *)(p->rounded + block * INPUTS + i) = __builtin_convertvector(number, bytes_at);
      totals[i / 16] += number;
    }
    sums(totals, 3);
    const int parts = parts_of_tile();
    p->row_scale[block] = peak / 127.0f + totals[0][2];
    for (int part = 0; part < parts; part++) {
      const float total = parts == 2 ? totals[0][part] : totals[0][0] + totals[0][1];
      p->row_sum[block * parts + part] = (int32_t)total;
      p->row_shift[block * parts + part] = p->row_scale[block] * total;
    }
  }
}

// Scales, or minima, of LANES outputs of a tile for the group that begins at, or holds, input `at`.
INLINE floats group_values(const Blocks *p, const void *inner, const void *above, long tile, long lane, long at) {
  const long index = (tile * (p->inputs / group) + at / group) * TILE + lane;
  if (!outer) return load(element(inner, index, FLOAT16), FLOAT16);
  const long index_above = (tile * (p->inputs / outer) + at / outer) * TILE + lane;
  return load(element(inner, index, INT8), INT8) * load(element(above, index_above, FLOAT16), FLOAT16);
}

// `rows` rounded rows times LANES outputs of a tile.
INLINE void integer_tile(const Blocks *p, long tile, long lane, long row, int rows) {
  const long count = p->inputs / INPUTS, size = TILE * INPUTS * code_bits / 8;
  const int parts = parts_of_tile(), unsigned_weights = code_bits == 4 || LANES == 16;
  const int offset = code_bits == 8 ? 128 * unsigned_weights : has_minimum ? 0 : 8;
  const uint8_t *at = p->codes + tile * count * size + 4 * lane;
  floats total[BLOCK_ROWS];
  UNROLL
  for (int r = 0; r < rows; r++) total[r] = (floats)0.0f;
  for (long block = 0; block < count; block++, at += size) {
    integers dot[2 * BLOCK_ROWS];
    UNROLL
    for (int i = 0; i < rows * parts; i++)
      dot[i] = (integers)(-offset * p->row_sum[((row + i % rows) * count + block) * parts + i / rows]);
    prefetch(at, size, BLOCKS_AHEAD);
    UNROLL
    for (int j = 0; j < 4; j++) {
      codes low = *(const codes_at *)(at + 64 * j), high = low >> 4;
      if (code_bits == 4) low &= 15;
      else high = *(const codes_at *)(at + 64 * (j + 4));
      if (code_bits == 8 && unsigned_weights) low ^= 128, high ^= 128;
      UNROLL
      for (int r = 0; r < rows; r++) {
        const int32_t *x = (const int32_t *)(p->rounded + (row + r) * p->inputs + block * INPUTS);
        dot[r] = add_dot(dot[r], low, x[j]);
        dot[r + (parts - 1) * rows] = add_dot(dot[r + (parts - 1) * rows], high, x[j + 4]);
      }
    }
    UNROLL
    for (int part = 0; part < parts; part++) {
      const long input = block * INPUTS + part * 16;
      const floats scale = group_values(p, p->scale, p->outer_scale, tile, lane, input);
      floats minimum = (floats)0.0f;
      if (has_minimum) minimum = group_values(p, p->minimum, p->outer_minimum, tile, lane, input);
      UNROLL
      for (int r = 0; r < rows; r++) {
        const long place = (row + r) * count + block;
        const floats number = __builtin_convertvector(dot[r + part * rows], floats);
        total[r] = fma_(scale * p->row_scale[place], number, total[r]);
        if (has_minimum) total[r] = fma_(minimum, (floats)p->row_shift[place * parts + part], total[r]);
      }
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) store(p->y + (row + r) * p->outputs + tile * TILE + lane, total[r]);
}

// The same of rows in float32 and weights widened in registers. Each half of a tile has sums of its own, for speed.
INLINE void float_tile(const Blocks *p, long tile, long lane, long row, int rows) {
  const long count = p->inputs / INPUTS, size = TILE * INPUTS * code_bits / 8;
  const uint8_t *at = p->codes + tile * count * size + 4 * lane;
  floats total[2 * BLOCK_ROWS];
  UNROLL
  for (int i = 0; i < 2 * rows; i++) total[i] = (floats)0.0f;
  for (long block = 0; block < count; block++, at += size) {
    prefetch(at, size, BLOCKS_AHEAD);
    UNROLL
    for (int half = 0; half < 2; half++) {
      const long input = block * INPUTS + half * 16;
      const floats scale = group_values(p, p->scale, p->outer_scale, tile, lane, input);
      floats minimum = scale * (code_bits == 4 ? -8.0f : 0.0f);
      if (has_minimum) minimum = group_values(p, p->minimum, p->outer_minimum, tile, lane, input);
      for (int j = 0; j < 4; j++) {
        const integers four = *(const integers_at *)(at + 64 * (code_bits == 4 ? j : 4 * half + j));
        UNROLL
        for (int i = 0; i < 4; i++) {
          const integers code = code_bits == 4 ? (four >> (8 * i + 4 * half)) & 15 : (four << (24 - 8 * i)) >> 24;
          const floats weight = fma_(__builtin_convertvector(code, floats), scale, minimum);
          UNROLL
          for (int r = 0; r < rows; r++) {
            const float x = p->x[(row + r) * p->inputs + input + 4 * j + i];
            total[2 * r + half] = fma_((floats)x, weight, total[2 * r + half]);
          }
        }
      }
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++)
    store(p->y + (row + r) * p->outputs + tile * TILE + lane, total[2 * r] + total[2 * r + 1]);
}

// All rows times TILES tiles, which stay in a core's cache.
INLINE void block_tiles(long piece, const Blocks *p, int rounded) {
  const long end = min_of((piece + 1) * TILES, p->outputs / TILE);
  for (long row = 0; row < p->rows; row += BLOCK_ROWS)
    for (long tile = piece * TILES; tile < end; tile++)
      for (long lane = 0; lane < TILE; lane += LANES)
        WITH_ROWS(p->rows - row, BLOCK_ROWS,
                  rounded ? integer_tile(p, tile, lane, row, N) : float_tile(p, tile, lane, row, N))
}

// ------------------------------------------------------------------------------------------------ norms

enum { NORMS_AT_ONCE = 64 };

typedef struct {
  const float *x, *weight;  // [rows, size], [size]
  float *y;
  float eps;
  long rows, size;
} Norm;

// y = weight * x / sqrt(mean(x * x) + eps), row by row.
NOINLINE void norms(long piece, const void *values) {
  const Norm *n = values;
  const long whole = n->size & -(long)LANES, end = min_of((piece + 1) * NORMS_AT_ONCE, n->rows);
  for (long row = piece * NORMS_AT_ONCE; row < end; row++) {
    const float *x = n->x + row * n->size;
    float *y = n->y + row * n->size;
    floats squares = (floats)0.0f;
    for (long at = 0; at < whole; at += LANES) squares = fma_(load(x + at, FLOAT32), load(x + at, FLOAT32), squares);
    float total = sum(squares);
    for (long at = whole; at < n->size; at++) total = __builtin_fmaf(x[at], x[at], total);
    const float factor = 1.0f / __builtin_sqrtf(total / (float)n->size + n->eps);
    for (long at = 0; at < whole; at += LANES)
      store(y + at, load(x + at, FLOAT32) * factor * load(n->weight + at, FLOAT32));
    for (long at = whole; at < n->size; at++) y[at] = x[at] * factor * n->weight[at];
  }
}

// ------------------------------------------------------------------------------------------------ attention

enum {
  CHUNK = 256,        // slots of the cache per partial sum; `cpu_kernels.CHUNK`
  STEP = 16,          // capacities are multiples of it; `cpu_kernels.STEP`
  BLOCK = 96,         // rows of a piece of work, of a prompt
  SMALL_BLOCK = 8,    // and of a window, so that threads share the few heads
  ROWS_AT_ONCE = 16,  // rows whose weights over a chunk are in memory
  ROWS = 4,           // rows of a tile
  SLOTS = 4,          // slots of a tile
  WIDE = LANES == 8 ? 2 : 4,  // vectors of a tile of values
};
#define MASKED_SCORE -1e30f  // the score of a slot that a row does not see
typedef struct {
  const float *q;             // [batch, width, KV heads, group, head_dim]: the query heads of a KV head are rows of it
  const void *k, *v;          // [batch, stored, capacity, head_dim]
  const int32_t *first, *last;  // [batch, width]: the first and the last slot that a row sees
  float *parts;               // [splits, pairs, rows, head_dim + 2]: the sums of a row, see Block
  long pairs;                 // batch x KV heads
  long heads, stored;         // KV heads, and those of the cache, which may hold several layers
  long first_head;            // of those of the cache
  long shared;                // query heads of a KV head
  long rows, capacity;        // rows: width x shared
  long live;                  // slots in use
  long splits;                // parts of the cache that are summed up separately: its chunks, or one
  long block, blocks;         // rows of a piece of work, and the number of pieces
} Attention;

typedef struct {
  const float *q;  // [rows, head_dim], divided by the root of head_dim
  float *sums;     // [rows, head_dim + 2]: over the slots so far of values, the highest score, the sum of weights
  int32_t first[ROWS_AT_ONCE], last[ROWS_AT_ONCE];
  long rows;
} Block;

// Offset in q, and in the output, of a row of a pair. Width 3, shared 2: rows 2 and 3 are both queries of position 1.
INLINE long query(const Attention *a, long pair, long row) {
  const long position = pair / a->heads * (a->rows / a->shared) + row / a->shared;
  return ((position * a->heads + pair % a->heads) * a->shared + row % a->shared) * head_dim;
}

// Offset in the caches of a slot of a pair.
INLINE long cached(const Attention *a, long pair, long slot) {
  return ((pair / a->heads * a->stored + a->first_head + pair % a->heads) * a->capacity + slot) * head_dim;
}

// Scores of `rows` queries with the keys of all slots, SLOTS at a time.
INLINE void scores(const float *q, const void *k, float *weights, long slots, int rows, Type type) {
  for (long slot = 0; slot < slots; slot += SLOTS)
    tile(q, element(k, slot * head_dim, type), weights + slot, head_dim, CHUNK, rows, SLOTS, type);
}

// Turns a row's scores into weights, in place: e to what each is below the highest, 0 where the row does not see.
// Returns the highest score, `highest` included; `total` becomes the sum of the weights.
INLINE float softmax_weights(float *scores, long place, long slots, int first, int last, float highest, float *total) {
  integers lane;
  UNROLL
  for (int i = 0; i < LANES; i++) lane[i] = i;
  floats best = (floats)highest, all = (floats)0.0f;
  for (long at = 0; at < slots; at += LANES) {
    integers slot = lane + (int)(place + at), seen = (slot >= first) & (slot <= last);
    best = larger(best, seen ? load(scores + at, FLOAT32) : (floats)MASKED_SCORE);
  }
  const float peak = largest(best);
  for (long at = 0; at < slots; at += LANES) {
    integers slot = lane + (int)(place + at), seen = (slot >= first) & (slot <= last);
    floats score = load(scores + at, FLOAT32);
    // A score that is not a number stays none: it is an error that somebody must notice.
    floats weight = seen ? exponential(score - peak) + (score - score) : (floats)0.0f;
    store(scores + at, weight);
    all += weight;
  }
  *total = sum(all);
  return peak;
}

// Adds `rows` rows of weights times the values of all slots to sums of a Block: `count` columns of the head.
INLINE void mix_columns(const float *weights, const void *v, float *sums, long slots, long count, int rows, Type type) {
  const int wide = count > LANES ? WIDE : 1;
  floats total[ROWS * WIDE];
  UNROLL
  for (int i = 0; i < rows * wide; i++)
    total[i] = load_some(sums + i / wide * (head_dim + 2) + i % wide * LANES, min_of(count, LANES), FLOAT32);
  for (long slot = 0; slot < slots; slot++) {
    const void *values = element(v, slot * head_dim, type);
    prefetch(values, count * bytes_of(type), AHEAD);
    UNROLL
    for (int column = 0; column < wide; column++) {
      const floats value = load_some(element(values, column * LANES, type), min_of(count, LANES), type);
      UNROLL
      for (int row = 0; row < rows; row++)
        total[row * wide + column] = fma_((floats)weights[row * CHUNK + slot], value, total[row * wide + column]);
    }
  }
  UNROLL
  for (int i = 0; i < rows * wide; i++)
    store_some(sums + i / wide * (head_dim + 2) + i % wide * LANES, min_of(count, LANES), total[i]);
}

INLINE void mix(const float *weights, const void *v, float *sums, long slots, int rows, Type type) {
  long column = 0;
  for (; column + WIDE * LANES <= head_dim; column += WIDE * LANES)
    mix_columns(weights, element(v, column, type), sums + column, slots, WIDE * LANES, rows, type);
  for (; column + LANES <= head_dim; column += LANES)
    mix_columns(weights, element(v, column, type), sums + column, slots, LANES, rows, type);
  if (column < head_dim)
    mix_columns(weights, element(v, column, type), sums + column, slots, head_dim - column, rows, type);
}

// Adds `slots` slots, at most CHUNK, to the sums of a block: those of k and v, which lie from `place` on.
INLINE void attend_chunk(const Block *b, const void *k, const void *v, long place, long slots, Type type) {
  const long size = head_dim + 2;
  float weights[ROWS_AT_ONCE * CHUNK] __attribute__((aligned(64)));
  for (long row = 0; row < b->rows; row += ROWS)
    WITH_ROWS(b->rows - row, ROWS, scores(b->q + row * head_dim, k, weights + row * CHUNK, slots, N, type))
  for (long row = 0; row < b->rows; row++) {
    float *values = b->sums + row * size, *highest = values + head_dim, total, before = *highest;
    *highest = softmax_weights(weights + row * CHUNK, place, slots, b->first[row], b->last[row], before, &total);
    const float left = exponential((floats)(before - *highest))[0];  // of the sums so far
    highest[1] = __builtin_fmaf(highest[1], left, total);
    for (long at = 0; at < head_dim; at++) values[at] *= left;
  }
  for (long row = 0; row < b->rows; row += ROWS)
    WITH_ROWS(b->rows - row, ROWS, mix(weights + row * CHUNK, v, b->sums + row * size, slots, N, type))
}

// The sums of a block of rows of a pair of sequence and KV head over one split of the cache. A window of a decode pass
// has one split per chunk, at absolute places, so that its bits do not depend on where it begins; a prompt has one.
INLINE void attend_block(long piece, const Attention *a, Type type) {
  // The last rows of a prompt see the most: they come first.
  const long pair = piece % a->pairs, split = piece / a->pairs % a->splits;
  const long block = a->blocks - 1 - piece / a->pairs / a->splits;
  const long from = a->splits > 1 ? split * CHUNK : 0, until = min_of(a->splits > 1 ? from + CHUNK : a->live, a->live);
  const long end = min_of((block + 1) * a->block, a->rows);
  const float factor = 1.0f / __builtin_sqrtf((float)head_dim);
  float scaled[ROWS_AT_ONCE * head_dim];
  for (long row = block * a->block; row < end; row += ROWS_AT_ONCE) {
    Block b = {.q = scaled, .rows = min_of(end - row, ROWS_AT_ONCE)};
    b.sums = a->parts + ((split * a->pairs + pair) * a->rows + row) * (head_dim + 2);
    long low = a->capacity, high = -1;
    for (long i = 0; i < b.rows; i++) {
      const long from_q = query(a, pair, row + i), position = from_q / (a->heads * a->shared * head_dim);
      b.first[i] = a->first[position], b.last[i] = a->last[position];
      low = min_of(low, b.first[i]), high = max_of(high, b.last[i]);
      float *sums = b.sums + i * (head_dim + 2);
      for (long at = 0; at < head_dim; at++) scaled[i * head_dim + at] = a->q[from_q + at] * factor;
      for (long at = 0; at < head_dim + 2; at++) sums[at] = at == head_dim ? MASKED_SCORE : 0.0f;
    }
    for (long place = max_of(from, low & -(long)CHUNK); place < min_of(until, high + 1); place += CHUNK) {
      const long needed = (min_of(until, high + 1) - place + STEP - 1) & -(long)STEP;
      const long at = cached(a, pair, place), slots = min_of(min_of(needed, CHUNK), a->capacity - place);
      attend_chunk(&b, element(a->k, at, type), element(a->v, at, type), place, slots, type);
    }
  }
}

// Adds up each row's splits, in their order, and divides by the sum of weights: zeros where a row sees nothing.
NOINLINE void combine_splits(const Attention *a, float *out) {
  const long split = a->pairs * a->rows * (head_dim + 2);
  for (long index = 0; index < a->pairs * a->rows; index++) {
    const float *sums = a->parts + index * (head_dim + 2);
    float highest = MASKED_SCORE, total = 0.0f, *y = out + query(a, index / a->rows, index % a->rows);
    for (long at = 0; at < head_dim; at++) y[at] = 0.0f;
    for (long s = 0; s < a->splits; s++) {
      const float score = sums[s * split + head_dim];
      highest = score > highest ? score : highest;
    }
    for (long s = 0; s < a->splits; s++, sums += split) {
      const float weight = exponential((floats)(sums[head_dim] - highest))[0];
      for (long at = 0; at < head_dim; at++) y[at] = __builtin_fmaf(sums[at], weight, y[at]);
      total = __builtin_fmaf(sums[head_dim + 1], weight, total);
    }
    const int sees = !(total <= 0.0f);  // or is not a number
    for (long at = 0; at < head_dim; at++) y[at] = sees ? y[at] / total : 0.0f;
  }
}

// ------------------------------------------------------------------------------------------------ rotation

enum { ROTATED_AT_ONCE = 8 };

typedef struct {
  const float *heads;      // [batch, width, KV heads, shared + 2, head_dim]: queries, key and value of each KV head
  const float *cos, *sin;  // [batch, width, head_dim / 2]; head_dim is a multiple of 32
  const int32_t *start;    // [batch]: the slot of a sequence's first row
  float *q;                // [batch, width, KV heads, shared, head_dim]
  float *k, *v;            // [batch, stored, capacity, head_dim]
  long rows, width;        // rows: batch x width
  long kv_heads, shared, capacity;
  long stored, first_head;  // KV heads of the caches, see Attention
} Rotation;

// Rotates pairs a, b of a head's two halves: a * cos - b * sin, b * cos + a * sin.
INLINE void rotate_head(const float *x, const float *cos, const float *sin, float *y) {
  for (long at = 0, half = head_dim / 2; at < half; at += LANES) {
    const floats a = load(x + at, FLOAT32), b = load(x + half + at, FLOAT32);
    const floats c = load(cos + at, FLOAT32), s = load(sin + at, FLOAT32);
    store(y + at, a * c - b * s);
    store(y + half + at, b * c + a * s);
  }
}

// Rotates queries and keys of some rows, and writes keys and values into the cache: see `plain_attention.contained`.
NOINLINE void rotate_rows(long piece, const void *values) {
  const Rotation *r = values;
  float key[head_dim];
  for (long row = piece * ROTATED_AT_ONCE; row < min_of((piece + 1) * ROTATED_AT_ONCE, r->rows); row++) {
    const long batch = row / r->width, start = max_of(min_of(r->start[batch], r->capacity - r->width), 0);
    const float *cos = r->cos + row * (head_dim / 2), *sin = r->sin + row * (head_dim / 2);
    for (long head = 0; head < r->kv_heads; head++) {
      const float *x = r->heads + (row * r->kv_heads + head) * (r->shared + 2) * head_dim;
      float *q = r->q + (row * r->kv_heads + head) * r->shared * head_dim;
      for (long i = 0; i < r->shared; i++) rotate_head(x + i * head_dim, cos, sin, q + i * head_dim);
      rotate_head(x + r->shared * head_dim, cos, sin, key);
      const float *value = x + (r->shared + 1) * head_dim;
      const long stored = batch * r->stored + r->first_head + head;
      const long slot = (stored * r->capacity + start + row % r->width) * head_dim;
      for (long at = 0; at < head_dim; at += LANES) {
        const floats k = load(key + at, FLOAT32), v = load(value + at, FLOAT32);
        const integers finite = v - v == 0.0f;
        store(r->k + slot + at, (finite & (k - k == 0.0f)) ? k : (floats)__builtin_nanf(""));
        store(r->v + slot + at, finite ? v : (floats)0.0f);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ argmax

typedef struct {
  const float *x;  // [rows, size], at least LANES numbers
  int32_t *y;      // [rows]
  long size;
} Rows;

// The first place of a row's largest number; `size`, where a number is NaN.
NOINLINE void argmax_row(long row, const void *values) {
  const Rows *r = values;
  floats best = (floats)-__builtin_inff();
  integers nan = (integers)0, turn = (integers)0;  // of LANES numbers, where the best was first seen
  for (long next = 0; next < r->size; next += LANES) {
    const long at = min_of(next, r->size - LANES);  // the last numbers are seen twice
    const floats number = load(r->x + row * r->size + at, FLOAT32);
    const integers higher = number > best;
    nan |= number != number;
    best = higher ? number : best;
    turn = higher ? (integers)(int)at : turn;
  }
  float peak = best[0];
  long place = turn[0];
  int is_nan = 0;
  for (int i = 0; i < LANES; i++) {
    if (best[i] > peak || (best[i] == peak && turn[i] + i < place)) peak = best[i], place = turn[i] + i;
    is_nan |= nan[i];
  }
  r->y[row] = (int32_t)(is_nan ? r->size : place);
}

// ------------------------------------------------------------------------------------------------ handlers

INLINE XLA_FFI_Buffer *argument(XLA_FFI_CallFrame *frame, long index) { return frame->args.args[index]; }
INLINE XLA_FFI_Buffer *result(XLA_FFI_CallFrame *frame, long index) { return frame->rets.rets[index]; }

// True if XLA only asks, at registration, which version of the interface a handler speaks. Minor versions move nothing
// that is read here.
INLINE int is_registration(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = frame->api->api_version.minor_version;
  return 1;
}

// product(x: [rows, inputs] float32, w: [outputs, inputs]) -> [rows, outputs] float32
INLINE XLA_FFI_Error *product(XLA_FFI_CallFrame *frame, Work *work) {
  if (is_registration(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1);
  Product values = {x->data, w->data, result(frame, 0)->data, x->dims[0], x->dims[1], w->dims[0]};
  parallel_for(frame, (values.outputs + PIECE - 1) / PIECE, work, &values);
  return NULL;
}

// attention(q: [batch, width, heads, head_dim] float32, k, v: [batch, KV heads, capacity, head_dim],
//           first, last: [batch, width] int32, live, head: int32) -> like q, parts: see Attention
INLINE XLA_FFI_Error *attention(XLA_FFI_CallFrame *frame, Work *work) {
  if (is_registration(frame)) return NULL;
  XLA_FFI_Buffer *q = argument(frame, 0), *k = argument(frame, 1), *parts = result(frame, 1);
  const long live = *(const int32_t *)argument(frame, 5)->data, head = *(const int32_t *)argument(frame, 6)->data;
  const long pairs = parts->dims[1], heads = pairs / k->dims[0], shared = q->dims[2] / heads;
  const long rows = q->dims[1] * shared, block = rows > BLOCK ? BLOCK : SMALL_BLOCK;
  const Attention a = {
      .q = q->data,
      .k = k->data,
      .v = argument(frame, 2)->data,
      .first = argument(frame, 3)->data,
      .last = argument(frame, 4)->data,
      .parts = parts->data,
      .pairs = pairs,
      .heads = heads,
      .stored = k->dims[1],
      .first_head = head,
      .shared = shared,
      .rows = rows,
      .capacity = k->dims[2],
      .live = live,
      .splits = parts->dims[0] > 1 ? (live + CHUNK - 1) / CHUNK : 1,
      .block = block,
      .blocks = (rows + block - 1) / block,
  };
  parallel_for(frame, a.pairs * a.splits * a.blocks, work, &a);
  combine_splits(&a, result(frame, 0)->data);
  return NULL;
}

// rotate(heads: [batch, width, KV heads, shared + 2, head_dim] float32, cos, sin: [batch, width, 1, head_dim / 2],
//        start: [batch] int32, head: int32, caches k and v: float32) -> q: [batch, width, heads, head_dim], and both
//        caches in place
XLA_FFI_Error *failfast_rotate(XLA_FFI_CallFrame *frame) {
  if (is_registration(frame)) return NULL;
  XLA_FFI_Buffer *heads = argument(frame, 0), *k = result(frame, 1);
  const float *cos = argument(frame, 1)->data, *sin = argument(frame, 2)->data;
  const int64_t *size = heads->dims;
  const long head = *(const int32_t *)argument(frame, 4)->data;
  const Rotation r = {heads->data, cos, sin, argument(frame, 3)->data, result(frame, 0)->data, k->data,
                      result(frame, 2)->data, size[0] * size[1], size[1], size[2], size[3] - 2, k->dims[2],
                      k->dims[1], head};
  parallel_for(frame, (r.rows + ROTATED_AT_ONCE - 1) / ROTATED_AT_ONCE, rotate_rows, &r);
  return NULL;
}

// argmax(x: [rows, size] float32) -> [rows] int32
XLA_FFI_Error *failfast_argmax(XLA_FFI_CallFrame *frame) {
  if (is_registration(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0);
  const Rows values = {x->data, result(frame, 0)->data, x->dims[1]};
  parallel_for(frame, x->dims[0], argmax_row, &values);
  return NULL;
}

// rms_norm(x: [rows, size], weight: [size], eps: scalar) -> [rows, size]; all float32
XLA_FFI_Error *failfast_rms_norm(XLA_FFI_CallFrame *frame) {
  if (is_registration(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0);
  const float eps = *(const float *)argument(frame, 2)->data;
  const Norm values = {x->data, argument(frame, 1)->data, result(frame, 0)->data, eps, x->dims[0], x->dims[1]};
  parallel_for(frame, (values.rows + NORMS_AT_ONCE - 1) / NORMS_AT_ONCE, norms, &values);
  return NULL;
}

#define PRODUCT(NAME, TYPE)                                                                              \
  NOINLINE void outputs_##NAME(long piece, const void *values) { outputs_of(piece, values, TYPE); }      \
  XLA_FFI_Error *failfast_product_##NAME(XLA_FFI_CallFrame *frame) { return product(frame, outputs_##NAME); }
#define ATTENTION(NAME, TYPE)                                                                            \
  NOINLINE void attend_##NAME(long piece, const void *values) { attend_block(piece, values, TYPE); }     \
  XLA_FFI_Error *failfast_attention_##NAME(XLA_FFI_CallFrame *frame) { return attention(frame, attend_##NAME); }

PRODUCT(float32, FLOAT32) PRODUCT(bfloat16, BFLOAT16) PRODUCT(float16, FLOAT16)
ATTENTION(float32, FLOAT32) ATTENTION(bfloat16, BFLOAT16) ATTENTION(float16, FLOAT16)

// Pointer to a layer's part of an array [layers, ...], whose numbers have `bytes` each.
INLINE const void *of_layer(XLA_FFI_Buffer *array, long layer, long bytes) {
  for (long axis = 1; axis < array->rank; axis++) bytes *= array->dims[axis];
  return (const char *)array->data + layer * bytes;
}

// blocks(x: [rows, inputs] float32, layer: int32, codes, scale, minimum, outer_scale, outer_minimum: [layers, ...], see
//        Blocks; empty, what a weight does not have) -> [rows, outputs] float32, and scratch memory for rounded rows
INLINE XLA_FFI_Error *block_product(XLA_FFI_CallFrame *frame, Work *work, int rounded) {
  if (is_registration(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0), *y = result(frame, 0);
  const long rows = x->dims[0], inputs = x->dims[1], blocks = rows * inputs / INPUTS;
  const long layer = *(const int32_t *)argument(frame, 1)->data, scale_bytes = bytes_of(outer ? INT8 : FLOAT16);
  char *scratch = result(frame, 1)->data;
  const Blocks p = {
      .x = x->data,
      .row_scale = (float *)scratch,
      .row_sum = (int32_t *)(scratch + blocks * 4),
      .row_shift = (float *)(scratch + blocks * 12),
      .rounded = (int8_t *)(scratch + blocks * 20),
      .codes = of_layer(argument(frame, 2), layer, 1),
      .scale = of_layer(argument(frame, 3), layer, scale_bytes),
      .minimum = of_layer(argument(frame, 4), layer, scale_bytes),
      .outer_scale = of_layer(argument(frame, 5), layer, bytes_of(FLOAT16)),
      .outer_minimum = of_layer(argument(frame, 6), layer, bytes_of(FLOAT16)),
      .y = y->data,
      .rows = rows,
      .inputs = inputs,
      .outputs = y->dims[1],
  };
  if (rounded) parallel_for(frame, (rows + ROUNDED_AT_ONCE - 1) / ROUNDED_AT_ONCE, round_rows, &p);
  parallel_for(frame, (p.outputs / TILE + TILES - 1) / TILES, work, &p);
  return NULL;
}

#define BLOCKS(NAME, ROUNDED)                                                                            \
  NOINLINE void blocks_##NAME(long piece, const void *values) { block_tiles(piece, values, ROUNDED); }   \
  XLA_FFI_Error *failfast_blocks_##NAME(XLA_FFI_CallFrame *frame) {                                      \
    return block_product(frame, blocks_##NAME, ROUNDED);                                                 \
  }

BLOCKS(int8, 1) BLOCKS(float32, 0)
