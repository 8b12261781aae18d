// The C functions of caches against the C++ ones they stand for.
#include "flashmoe/attention.h"
#include "flashmoe/c_api.h"
#include "flashmoe/cache.h"
#include "tensors.h"
#include "testing.h"

using namespace testing;
using flashmoe::contiguous;

namespace {

constexpr int64_t kTokens = 9, kSequences = 3, kHeadsQ = 6, kHeads = 2, kDim = 8, kDimV = 5;
constexpr int64_t kBlocks = 7, kPage = 4, kEntries = 3;

Tensor random_tensor(Random& random, DType dtype, std::vector<int64_t> shape) {
  Tensor t(dtype, shape);
  t.set(random_values(random, t.count()));
  return t;
}

Tensor integers(DType dtype, const Values& values, std::vector<int64_t> shape) {
  Tensor t(dtype, shape);
  t.set(values);
  return t;
}

// A problem with everything in it, and the C arguments for the same memory.
struct Call {
  Tensor query, k_cache, v_cache, table, lengths, starts, sinks, k_scale, v_scale, out, lse;
  flash_attention_paged_args args;

  explicit Call(DType dtype) {
    Random random(5);
    query = random_tensor(random, dtype, {kTokens, kHeadsQ, kDim});
    k_cache = random_tensor(random, DType::kFloat8E4M3, {kBlocks, kPage, kHeads, kDim});
    v_cache = random_tensor(random, DType::kFloat8E4M3, {kBlocks, kPage, kHeads, kDimV});
    table = integers(DType::kInt64, {6, 1, 2, 3, -1, -1, 0, 5, -1}, {kSequences, kEntries});
    lengths = integers(DType::kInt64, {11, 3, 8}, {kSequences});
    starts = integers(DType::kInt64, {0, 1, 4, 8}, {kSequences + 1});
    sinks = random_tensor(random, DType::kFloat32, {kHeadsQ});
    k_scale = integers(DType::kFloat32, {0.5}, {});
    v_scale = integers(DType::kFloat32, {2, 0.25}, {kHeads});
    out = Tensor(dtype, {kTokens, kHeadsQ, kDimV});
    lse = Tensor(DType::kFloat32, {kTokens, kHeadsQ});

    CHECK_EQ(flash_attention_paged_args_init(&args, sizeof args), FLASH_ATTENTION_OK);
    args.sequences = kSequences;
    args.tokens = kTokens;
    args.heads_q = kHeadsQ;
    args.heads_k = kHeads;
    args.head_dim = kDim;
    args.head_dim_v = kDimV;
    args.blocks = kBlocks;
    args.page = kPage;
    args.blocks_of_sequence = kEntries;
    args.max_seqlen_q = 4;
    args.max_seqlen_k = 12;
    args.query.data = query.data();
    args.k_cache.data = k_cache.data();
    args.v_cache.data = v_cache.data();
    args.block_table.data = table.data();
    args.seq_lens.data = lengths.data();
    args.cu_seqlens_q.data = starts.data();
    args.sinks.data = sinks.data();
    args.cache_dtype = FLASH_ATTENTION_CACHE_E4M3;
    args.int_dtype = FLASH_ATTENTION_INT64;
    args.k_scale = static_cast<const float*>(k_scale.data());
    args.v_scale = static_cast<const float*>(v_scale.data());
    args.v_scale_per_head = 1;
    args.window_left = 6;
    args.scale = 0.3;
    args.has_scale = 1;
    args.softcap = 5;
    args.causal = 1;
    args.out.data = out.data();
    args.lse.data = lse.data();
  }

  void run_cpp() {
    flashmoe::AttentionProblem p;
    p.query = query.spec();
    p.key = k_cache.spec();
    p.value = v_cache.spec();
    p.paged = flashmoe::Paged{table.spec(), lengths.spec(), starts.spec(), 4,
                              12,           k_scale.spec(), v_scale.spec()};
    p.sinks = sinks.spec();
    p.out = out.spec();
    p.lse = lse.spec();
    p.options = {.causal = true, .window_left = 6, .scale = 0.3, .softcap = 5};
    flashmoe::AttentionTensors t;
    t.query = query.data();
    t.key = k_cache.data();
    t.value = v_cache.data();
    t.block_table = table.data();
    t.seq_lens = lengths.data();
    t.cu_seqlens_q = starts.data();
    t.sinks = sinks.data();
    t.k_scale = k_scale.data();
    t.v_scale = v_scale.data();
    t.out = out.data();
    t.lse = lse.data();
    const auto plan = flashmoe::plan(p);
    CHECK(plan.ok(), plan.status().message());
    std::vector<std::byte> workspace(plan.value().workspace_bytes);
    CHECK(flashmoe::run(plan.value(), t, workspace.data()).ok());
  }
};

int run_c(const flash_attention_paged_args& args, DType dtype) {
  return dtype == DType::kFloat16 ? flash_attention_paged_forward_fp16(&args)
                                  : flash_attention_paged_forward_bf16(&args);
}

void check_refused(const flash_attention_paged_args& args, const char* said) {
  CHECK_EQ(flash_attention_paged_forward_bf16(&args), FLASH_ATTENTION_INVALID_ARGUMENT);
  CHECK_CONTAINS(flash_attention_last_error(), said);
}

}  // namespace

TEST(same_results_as_cpp) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Call call(dtype);
    CHECK_EQ(run_c(call.args, dtype), FLASH_ATTENTION_OK);
    CHECK_EQ(std::string(flash_attention_last_error()), std::string());
    const Values out = call.out.values(), lse = call.lse.values();
    call.out.poison();
    call.lse.poison();
    call.run_cpp();
    CHECK(call.out.values() == out);
    CHECK(call.lse.values() == lse);
  }
}

TEST(strides_and_workspace) {
  Call call(DType::kBFloat16);
  CHECK_EQ(run_c(call.args, DType::kBFloat16), FLASH_ATTENTION_OK);
  const Values want = call.out.values();
  // The same keys in pages with the heads first.
  Tensor turned(DType::kFloat8E4M3, {kBlocks, kPage, kHeads, kDim},
                {{0, 2, 1, 3}, {1, 1, 1, 1}, std::vector<bool>(4)});
  turned.set(call.k_cache.values());
  call.args.k_cache.data = turned.data();
  std::copy_n(turned.spec().stride.begin(), 4, call.args.k_cache.strides);
  uint64_t bytes = 0;
  CHECK_EQ(flash_attention_paged_workspace_bytes(&call.args, FLASH_ATTENTION_BF16, &bytes),
           FLASH_ATTENTION_OK);
  alignas(64) static std::byte workspace[1 << 20];
  CHECK(bytes > 0 && bytes <= sizeof workspace, bytes);
  call.args.workspace = workspace;
  call.args.workspace_bytes = bytes;
  call.out.poison();
  CHECK_EQ(run_c(call.args, DType::kBFloat16), FLASH_ATTENTION_OK);
  CHECK(call.out.values() == want);
  call.args.workspace_bytes = bytes - 1;
  check_refused(call.args, "workspace_bytes");
}

TEST(mistakes_are_explained) {
  CHECK_EQ(flash_attention_paged_forward_fp16(nullptr), FLASH_ATTENTION_INVALID_ARGUMENT);
  CHECK_CONTAINS(flash_attention_last_error(), "args is NULL");
  const Call good(DType::kBFloat16);
  flash_attention_paged_args args = good.args;
  args.struct_size = 8;
  check_refused(args, "flash_attention_paged_args_init");
  args = good.args;
  args.cache_dtype = 2;
  check_refused(args, "cache_dtype is 2");
  args = good.args;
  args.int_dtype = -1;
  check_refused(args, "int_dtype is -1");
  args = good.args;
  args.device = -2;
  check_refused(args, "device is -2");
  args = good.args;
  args.k_cache.data = nullptr;
  check_refused(args, "k_cache is null");
  args = good.args;
  args.max_seqlen_k = 10;
  check_refused(args, "seq_lens[0] is 11");
  args = good.args;
  args.cu_seqlens_q.data = nullptr;
  check_refused(args, "query has 9 tokens");
  args = good.args;
  args.sequences = INT64_MAX;
  check_refused(args, "2^63");
}

TEST(append_is_the_same_as_cpp) {
  Random random(9);
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Tensor key = random_tensor(random, dtype, {kTokens, kHeads, kDim});
    const Tensor value = random_tensor(random, dtype, {kTokens, kHeads, kDimV});
    const Tensor slots = integers(DType::kInt32, {3, -1, 27, 28, 0, 9, 12, 13, 14}, {kTokens});
    const Tensor scale = integers(DType::kFloat32, {0.5, 2}, {kHeads});
    Tensor k_cache(DType::kFloat8E4M3, {kBlocks, kPage, kHeads, kDim});
    Tensor v_cache(DType::kFloat8E4M3, {kBlocks, kPage, kHeads, kDimV});
    flash_kv_cache_append_args args;
    CHECK_EQ(flash_kv_cache_append_args_init(&args, sizeof args), FLASH_ATTENTION_OK);
    args.tokens = kTokens;
    args.heads = kHeads;
    args.head_dim = kDim;
    args.head_dim_v = kDimV;
    args.blocks = kBlocks;
    args.page = kPage;
    args.key.data = key.data();
    args.value.data = value.data();
    args.slot_mapping.data = slots.data();
    args.k_cache.data = k_cache.data();
    args.v_cache.data = v_cache.data();
    args.cache_dtype = FLASH_ATTENTION_CACHE_E4M3;
    args.k_scale = static_cast<const float*>(scale.data());
    args.k_scale_per_head = 1;
    const auto append =
        dtype == DType::kFloat16 ? flash_kv_cache_append_fp16 : flash_kv_cache_append_bf16;
    CHECK_EQ(append(&args), FLASH_ATTENTION_OK);
    const std::vector<std::byte> got(k_cache.memory(), k_cache.memory() + k_cache.bytes());
    k_cache.poison();
    flashmoe::AppendProblem p;
    p.key = key.spec();
    p.value = value.spec();
    p.key_cache = k_cache.spec();
    p.value_cache = v_cache.spec();
    p.slots = slots.spec();
    p.k_scale = scale.spec();
    const auto plan = flashmoe::plan(p);
    CHECK(plan.ok(), plan.status().message());
    CHECK(flashmoe::run(plan.value(), {key.data(), value.data(), k_cache.data(), v_cache.data(),
                                       slots.data(), scale.data()})
              .ok());
    CHECK(got == std::vector<std::byte>(k_cache.memory(), k_cache.memory() + k_cache.bytes()));
    args.slot_mapping.data = nullptr;
    CHECK_EQ(append(&args), FLASH_ATTENTION_INVALID_ARGUMENT);
    CHECK_CONTAINS(flash_attention_last_error(), "slot_mapping is null");
    args.cache_dtype = 7;
    CHECK_EQ(append(&args), FLASH_ATTENTION_INVALID_ARGUMENT);
    CHECK_CONTAINS(flash_attention_last_error(), "cache_dtype is 7");
  }
}
