/* Attention, below it attention over the pages of a cache and a mixture of experts, from C and from
 * whatever calls C: Fortran, Julia, Rust, ...
 *
 *   out = softmax(softcap(scale * q k^T) + bias, over the allowed keys) v
 *   lse = natural log of the softmax denominator, which sinks add to
 *
 *   flash_attention_args args;
 *   flash_attention_args_init(&args, sizeof args);
 *   args.batch = 2;  args.heads_q = args.heads_k = 8;
 *   args.len_q = args.len_k = 128;  args.head_dim = args.head_dim_v = 64;
 *   args.query.data = q;  args.key.data = k;  args.value.data = v;  args.out.data = out;
 *   if (flash_attention_forward_fp16(&args) != 0) puts(flash_attention_last_error());
 *
 * fp16 is IEEE binary16 and bf16 the upper half of a float; both are passed as 16-bit words. Sums
 * and the softmax are computed in float. Functions may be called from several threads at once.
 * Nothing prints, exits or throws, and memory is only read and written during the call.
 *
 * For bindings: every function takes pointers and plain integers, every struct has the C layout,
 * the members are 64-bit except where they say int32_t, and there is no padding to guess: int32_t
 * members come in pairs. */
#ifndef FLASHMOE_C_API_H_
#define FLASHMOE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FLASHMOE_C_API __attribute__((visibility("default")))
#else
#define FLASHMOE_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns. flash_attention_last_error() has the words: the argument, its value and
 * what would work. */
enum {
  FLASH_ATTENTION_OK = 0,
  FLASH_ATTENTION_INVALID_ARGUMENT = 1, /* the call contradicts itself or its data */
  FLASH_ATTENTION_UNSUPPORTED = 2,      /* legal, but nothing here does it */
  FLASH_ATTENTION_OUT_OF_MEMORY = 3,
  FLASH_ATTENTION_INTERNAL_ERROR = 4 /* a bug of the library's */
};

enum { FLASH_ATTENTION_FP16 = 0, FLASH_ATTENTION_BF16 = 1 };
enum {
  FLASH_ATTENTION_BIAS_LIKE_INPUT = 0,
  FLASH_ATTENTION_BIAS_FP32 = 1,
  FLASH_ATTENTION_BIAS_MASK = 2 /* a byte for each pair: 1, the key is seen; 0, it is not */
};

enum { FLASH_ATTENTION_FORWARD = 0, FLASH_ATTENTION_BACKWARD = 1 };

#define FLASH_ATTENTION_HOST (-1) /* for `device`: pointers are to ordinary memory */

/* A tensor of four dimensions, as a pointer to its first element and the distance, in elements,
 * from one element to the next along each dimension. Strides may be anything, 0 included for a
 * tensor that is only read. All strides 0 means contiguous: the last dimension is dense and each
 * earlier one steps over the later ones (C order). Inputs are never written. */
typedef struct flash_attention_tensor {
  void* data;
  int64_t strides[4];
} flash_attention_tensor;

/* One call. Start with flash_attention_args_init(), then set what you need: everything else keeps
 * its default. */
typedef struct flash_attention_args {
  uint64_t struct_size; /* set by flash_attention_args_init() */

  int64_t batch;
  int64_t heads_q; /* a multiple of heads_k: query head h uses key head h / (heads_q / heads_k) */
  int64_t heads_k;
  int64_t len_q; /* batch and lengths may be 0 */
  int64_t len_k;
  int64_t head_dim;   /* of query and key, 1 to 256 */
  int64_t head_dim_v; /* of value and out, 1 to 256 */

  /* Inputs. */
  flash_attention_tensor query; /* (batch, heads_q, len_q, head_dim) */
  flash_attention_tensor key;   /* (batch, heads_k, len_k, head_dim) */
  flash_attention_tensor value; /* (batch, heads_k, len_k, head_dim_v) */

  /* Added to the scores, or a mask of bytes. data NULL: none. -inf hides a key. */
  flash_attention_tensor bias; /* (batch or 1, heads_q or 1, len_q or 1, len_k or 1) */
  int64_t bias_shape[4];       /* those sizes; all 0: full size */
  int32_t bias_dtype; /* FLASH_ATTENTION_BIAS_LIKE_INPUT (default), _BIAS_FP32 or _BIAS_MASK */

  /* Options. With L keys in a sequence, query row i sits at key position p = i + L - len_q, so the
   * last query is level with the last key. */
  int32_t causal;        /* not 0: key j is seen only when j <= p. Default 0 */
  int64_t window_left;   /* key j is seen only when p - window_left <= j; -1 (default): no limit */
  int64_t window_right;  /* and when j <= p + window_right; -1 (default): no limit */
  double scale;          /* used when has_scale is not 0 */
  double softcap;        /* c * tanh(score / c) for c > 0; 0 (default): off */
  int32_t has_scale;     /* 0 (default): scale is 1 / sqrt(head_dim), whatever `scale` says */
  int32_t deterministic; /* not 0: the backward pass must be bitwise repeatable. Default 0 */
  const int32_t* key_lengths;   /* (batch), dense, each 0 to len_k; NULL (default): all len_k */
  flash_attention_tensor sinks; /* float, (heads_q): exp(sink) joins the denominator of every row of
                                   a head; strides[1] and on are not used. NULL: none */
  /* Pairs to drop after the softmax, which are the same in both passes and on every device. */
  double dropout_p;    /* their share, 0 (default) to 1; the others count 1 / (1 - dropout_p) */
  const int64_t* seed; /* one number, where the tensors are: which pairs. Needed with dropout_p */

  /* Results of the forward pass, inputs of the backward pass. */
  flash_attention_tensor out; /* (batch, heads_q, len_q, head_dim_v) */
  flash_attention_tensor lse; /* float, (batch, heads_q, len_q): strides[3] is not used. Forward:
                                 NULL if not wanted. Backward: needed */

  /* Backward only. Gradients of the results: inputs; NULL stands for zero. */
  flash_attention_tensor grad_out; /* like out */
  flash_attention_tensor grad_lse; /* like lse */
  /* Gradients of the inputs: written, not added to; NULL if not wanted. */
  flash_attention_tensor grad_query;
  flash_attention_tensor grad_key;
  flash_attention_tensor grad_value;
  flash_attention_tensor grad_bias;  /* the shape and type of bias; a mask has none */
  flash_attention_tensor grad_sinks; /* float, (heads_q) */

  /* Scratch memory, flash_attention_workspace_bytes() of it, 64-byte aligned, on the device of the
   * tensors. NULL, for host memory only: the library allocates and frees it within the call. */
  void* workspace;
  uint64_t workspace_bytes;

  int64_t device; /* FLASH_ATTENTION_HOST (default), or a CUDA device ordinal */
  void* stream;   /* CUDA: the CUstream to launch on; NULL: the default stream. Host: not used */
} flash_attention_args;

/* Fills in the defaults: sizes 0, pointers NULL, options off. struct_size is
 * sizeof(flash_attention_args) as the caller sees it, so that a program built against another
 * version is refused, not misread. */
FLASHMOE_C_API int flash_attention_args_init(flash_attention_args* args, size_t struct_size);

/* Reads query, key, value (bias, key_lengths, sinks, seed); writes out (lse). Returns when done on
 * the host, when launched on a CUDA device. */
FLASHMOE_C_API int flash_attention_forward_fp16(const flash_attention_args* args);
FLASHMOE_C_API int flash_attention_forward_bf16(const flash_attention_args* args);

/* Reads the inputs and out, lse, grad_out, grad_lse; writes every grad_* of an input that is not
 * NULL. */
FLASHMOE_C_API int flash_attention_backward_fp16(const flash_attention_args* args);
FLASHMOE_C_API int flash_attention_backward_bf16(const flash_attention_args* args);

/* How much workspace this call needs; reads no tensor. dtype is FLASH_ATTENTION_FP16 or _BF16, pass
 * is FLASH_ATTENTION_FORWARD or _BACKWARD. Of a tensor's pointer only whether it is NULL counts. */
FLASHMOE_C_API int flash_attention_workspace_bytes(const flash_attention_args* args, int dtype,
                                                   int pass, uint64_t* bytes);

/* Why the last call on this thread failed, or "" if it did not. Valid until the next call. */
FLASHMOE_C_API const char* flash_attention_last_error(void);

/* "0.1.0" */
FLASHMOE_C_API const char* flash_attention_version(void);

/* Attention over the pages of a cache, forward only. Of the sequences, sequence i has seq_lens[i]
 * keys; key j is row j % page of block block_table[i, j / page]. Its queries sit at its last
 * positions.
 *
 *   flash_attention_paged_args args;
 *   flash_attention_paged_args_init(&args, sizeof args);
 *   args.sequences = args.tokens = 3;  args.heads_q = 8;  args.heads_k = 2;
 *   args.head_dim = args.head_dim_v = 64;
 *   args.blocks = 100;  args.page = 16;  args.blocks_of_sequence = 20;  args.max_seqlen_k = 320;
 *   args.query.data = q;  args.k_cache.data = k;  args.v_cache.data = v;  args.out.data = out;
 *   args.block_table.data = table;  args.seq_lens.data = lengths;
 *   if (flash_attention_paged_forward_bf16(&args) != 0) puts(flash_attention_last_error());
 *
 * On the host a length or an entry of the table that is wrong is an error, with nothing computed;
 * on a CUDA device that sequence is NaN. Entries of the table for keys that no query sees are not
 * read. */

enum { FLASH_ATTENTION_INT32 = 0, FLASH_ATTENTION_INT64 = 1 };
enum { FLASH_ATTENTION_CACHE_LIKE_INPUT = 0, FLASH_ATTENTION_CACHE_E4M3 = 1 };

typedef struct flash_attention_paged_args {
  uint64_t struct_size; /* set by flash_attention_paged_args_init() */

  int64_t sequences;
  int64_t tokens; /* of all sequences; those after the last one's give 0 */
  int64_t heads_q;
  int64_t heads_k;
  int64_t head_dim;   /* of query and keys, 1 to 512 */
  int64_t head_dim_v; /* of values and out, 1 to 512 */
  int64_t blocks;
  int64_t page;               /* keys of a block */
  int64_t blocks_of_sequence; /* entries of the table for each sequence */
  int64_t max_seqlen_q;       /* no sequence has more queries; not used without cu_seqlens_q */
  int64_t max_seqlen_k;       /* no sequence has more keys */

  /* Inputs. Strides past a tensor's last dimension are not used. */
  flash_attention_tensor query;        /* (tokens, heads_q, head_dim) */
  flash_attention_tensor k_cache;      /* (blocks, page, heads_k, head_dim) */
  flash_attention_tensor v_cache;      /* (blocks, page, heads_k, head_dim_v) */
  flash_attention_tensor block_table;  /* integers, (sequences, blocks_of_sequence) */
  flash_attention_tensor seq_lens;     /* integers, (sequences) */
  flash_attention_tensor cu_seqlens_q; /* integers, (sequences + 1): sequence i has the queries
                                          cu_seqlens_q[i] .. cu_seqlens_q[i + 1]. NULL: one each */
  flash_attention_tensor sinks;        /* float, (heads_q): exp(sink) joins the denominator of every
                                          row of a head. NULL: none */
  int32_t cache_dtype; /* FLASH_ATTENTION_CACHE_LIKE_INPUT (default) or _CACHE_E4M3 */
  int32_t int_dtype;   /* of all integers: FLASH_ATTENTION_INT32 (default) or _INT64 */

  /* What numbers of an e4m3 cache are times of: one float, or one for each key head. NULL: 1 */
  const float* k_scale;
  const float* v_scale;
  int32_t k_scale_per_head; /* not 0: (heads_k). Default 0 */
  int32_t v_scale_per_head;

  /* Options, as those of flash_attention_args. */
  int64_t window_left;
  int64_t window_right;
  double scale;
  double softcap;
  int32_t has_scale;
  int32_t causal;

  flash_attention_tensor out; /* (tokens, heads_q, head_dim_v) */
  flash_attention_tensor lse; /* float, (tokens, heads_q). NULL if not wanted */

  /* As those of flash_attention_args. */
  void* workspace;
  uint64_t workspace_bytes;
  int64_t device;
  void* stream;
} flash_attention_paged_args;

FLASHMOE_C_API int flash_attention_paged_args_init(flash_attention_paged_args* args,
                                                   size_t struct_size);
FLASHMOE_C_API int flash_attention_paged_forward_fp16(const flash_attention_paged_args* args);
FLASHMOE_C_API int flash_attention_paged_forward_bf16(const flash_attention_paged_args* args);
/* How much workspace this call needs; reads no tensor. */
FLASHMOE_C_API int flash_attention_paged_workspace_bytes(const flash_attention_paged_args* args,
                                                         int dtype, uint64_t* bytes);

/* Writes keys and values to a cache: token t to row slot_mapping[t] % page of block
 * slot_mapping[t] / page. A negative slot is padding and one past the cache is skipped. No two
 * tokens have the same slot. */
typedef struct flash_kv_cache_append_args {
  uint64_t struct_size; /* set by flash_kv_cache_append_args_init() */

  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t blocks;
  int64_t page;

  flash_attention_tensor key;          /* (tokens, heads, head_dim) */
  flash_attention_tensor value;        /* (tokens, heads, head_dim_v) */
  flash_attention_tensor slot_mapping; /* integers, (tokens) */
  flash_attention_tensor k_cache;      /* (blocks, page, heads, head_dim): written */
  flash_attention_tensor v_cache;      /* (blocks, page, heads, head_dim_v) */
  int32_t cache_dtype;                 /* as those of flash_attention_paged_args */
  int32_t int_dtype;

  /* For e4m3: key / k_scale is stored, rounded to nearest even and held within +-448. */
  const float* k_scale;
  const float* v_scale;
  int32_t k_scale_per_head;
  int32_t v_scale_per_head;

  int64_t device;
  void* stream;
} flash_kv_cache_append_args;

FLASHMOE_C_API int flash_kv_cache_append_args_init(flash_kv_cache_append_args* args,
                                                   size_t struct_size);
FLASHMOE_C_API int flash_kv_cache_append_fp16(const flash_kv_cache_append_args* args);
FLASHMOE_C_API int flash_kv_cache_append_bf16(const flash_kv_cache_append_args* args);

/* A mixture of experts.
 *
 *   out[t] = sum over j of weights[t, j] * down[e] act(gate_up[e] x[t]),   e = ids[t, j]
 *
 *   flash_moe_args args;
 *   flash_moe_args_init(&args, sizeof args);
 *   args.tokens = 64;  args.top_k = 2;  args.experts = 8;  args.width = 32;  args.inner = 48;
 *   args.x.data = x;  args.gate_up.data = gate_up;  args.down.data = down;
 *   args.ids.data = ids;  args.weights.data = weights;  args.out.data = out;
 *   if (flash_moe_forward_bf16(&args) != 0) puts(flash_moe_last_error());
 *
 * Codes, dtypes and passes are attention's: FLASH_ATTENTION_OK and so on. */

/* The first three have a gate: silu(gate) * up, gelu(gate) * up, relu(gate) * up. gelu is the exact
 * one (erf). */
enum {
  FLASH_MOE_SWIGLU = 0,
  FLASH_MOE_GEGLU = 1,
  FLASH_MOE_REGLU = 2,
  FLASH_MOE_SILU = 3,
  FLASH_MOE_GELU = 4,
  FLASH_MOE_RELU = 5
};

enum { FLASH_MOE_IDS_INT32 = 0, FLASH_MOE_IDS_INT64 = 1 };

/* A tensor of up to three dimensions, with strides as those of flash_attention_tensor; those past
 * its last dimension are not used. */
typedef struct flash_moe_tensor {
  void* data;
  int64_t strides[3];
} flash_moe_tensor;

/* One call. G is 2 for an activation with a gate, else 1. Start with flash_moe_args_init(). */
typedef struct flash_moe_args {
  uint64_t struct_size; /* set by flash_moe_args_init() */

  int64_t tokens; /* any size may be 0 */
  int64_t top_k;  /* experts of a token */
  int64_t experts;
  int64_t width;
  int64_t inner;
  int32_t activation; /* FLASH_MOE_SWIGLU (default) or its like */
  int32_t ids_dtype;  /* FLASH_MOE_IDS_INT32 (default) or _INT64 */

  /* Inputs. */
  flash_moe_tensor x;         /* (tokens, width) */
  flash_moe_tensor gate_up;   /* (experts, G inner, width): gate rows first, then up rows */
  flash_moe_tensor down;      /* (experts, width, inner) */
  flash_moe_tensor up_bias;   /* (experts, G inner), added before the activation. NULL: none */
  flash_moe_tensor down_bias; /* (experts, width), weighted with what it is added to. NULL: none */
  flash_moe_tensor ids;       /* (tokens, top_k); outside 0 .. experts - 1: no expert */
  flash_moe_tensor weights;   /* float, (tokens, top_k). NULL: 1 */

  /* Results of the forward pass. The last two are inputs of the backward pass; forward, NULL keeps
   * nothing for it. */
  flash_moe_tensor out; /* (tokens, width). Not read backward */
  flash_moe_tensor pre; /* (tokens top_k, G, inner): pre-activations, in the order of routing */
  int32_t* routing;     /* (experts + 1 + tokens top_k), dense */

  /* Backward only. The gradient of out: NULL makes all gradients 0. */
  flash_moe_tensor grad_out;
  /* Gradients of the inputs: written, not added to; NULL if not wanted. */
  flash_moe_tensor grad_x;
  flash_moe_tensor grad_gate_up;
  flash_moe_tensor grad_down;
  flash_moe_tensor grad_up_bias;
  flash_moe_tensor grad_down_bias;
  flash_moe_tensor grad_weights; /* float */

  /* As those of flash_attention_args. */
  void* workspace;
  uint64_t workspace_bytes;
  int64_t device;
  void* stream;
} flash_moe_args;

FLASHMOE_C_API int flash_moe_args_init(flash_moe_args* args, size_t struct_size);

/* Reads the inputs; writes out (pre, routing). */
FLASHMOE_C_API int flash_moe_forward_fp16(const flash_moe_args* args);
FLASHMOE_C_API int flash_moe_forward_bf16(const flash_moe_args* args);

/* Reads the inputs, pre, routing and grad_out; writes every grad_* of an input that is not NULL. */
FLASHMOE_C_API int flash_moe_backward_fp16(const flash_moe_args* args);
FLASHMOE_C_API int flash_moe_backward_bf16(const flash_moe_args* args);

FLASHMOE_C_API int flash_moe_workspace_bytes(const flash_moe_args* args, int dtype, int pass,
                                             uint64_t* bytes);

FLASHMOE_C_API const char* flash_moe_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* FLASHMOE_C_API_H_ */
