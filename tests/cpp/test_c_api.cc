// The C functions against the C++ ones they stand for. examples/c shows that the header is C.
#include <thread>

#include "cases.h"
#include "flashmoe/c_api.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr int64_t kBatch = 2, kHeadsQ = 4, kHeadsK = 2, kRows = 19, kKeys = 23, kDim = 8, kDimV = 5;

// A problem with everything in it, and the C arguments for the same memory.
struct Call {
  Case c;
  std::vector<int32_t> key_lengths = {23, 7};
  flash_attention_args args;

  explicit Call(DType dtype) {
    Random random(11);
    const auto tensor = [&](DType type, std::vector<int64_t> shape) {
      Tensor t(type, shape);
      t.set(random_values(random, t.count()));
      return t;
    };
    c.query = tensor(dtype, {kBatch, kHeadsQ, kRows, kDim});
    c.key = tensor(dtype, {kBatch, kHeadsK, kKeys, kDim});
    c.value = tensor(dtype, {kBatch, kHeadsK, kKeys, kDimV});
    c.bias = tensor(DType::kFloat32, {1, kHeadsQ, 1, kKeys});
    c.key_lengths = Tensor(DType::kInt32, {kBatch});
    c.key_lengths.set({23, 7});
    c.out = tensor(dtype, {kBatch, kHeadsQ, kRows, kDimV});
    c.lse = tensor(DType::kFloat32, {kBatch, kHeadsQ, kRows});
    c.grad_out = tensor(dtype, c.out.shape());
    c.grad_lse = tensor(DType::kFloat32, c.lse.shape());
    c.grad_query = tensor(dtype, c.query.shape());
    c.grad_key = tensor(dtype, c.key.shape());
    c.grad_value = tensor(dtype, c.value.shape());
    c.grad_bias = tensor(DType::kFloat32, c.bias.shape());
    c.options.causal = true;
    c.options.window_left = 9;
    c.options.scale = 0.3;
    c.options.softcap = 4;

    CHECK_EQ(flash_attention_args_init(&args, sizeof args), FLASH_ATTENTION_OK);
    args.batch = kBatch;
    args.heads_q = kHeadsQ;
    args.heads_k = kHeadsK;
    args.len_q = kRows;
    args.len_k = kKeys;
    args.head_dim = kDim;
    args.head_dim_v = kDimV;
    const int64_t bias_shape[] = {1, kHeadsQ, 1, kKeys};
    std::copy_n(bias_shape, 4, args.bias_shape);
    args.bias_dtype = FLASH_ATTENTION_BIAS_FP32;
    args.causal = 1;
    args.window_left = 9;
    args.has_scale = 1;
    args.scale = 0.3;
    args.softcap = 4;
    args.key_lengths = key_lengths.data();
    point_at_tensors();
  }

  void point_at_tensors() {
    args.query.data = c.query.data();
    args.key.data = c.key.data();
    args.value.data = c.value.data();
    args.bias.data = c.bias.data();
    args.out.data = c.out.data();
    args.lse.data = c.lse.data();
    args.grad_out.data = c.grad_out.data();
    args.grad_lse.data = c.grad_lse.data();
    args.grad_query.data = c.grad_query.data();
    args.grad_key.data = c.grad_key.data();
    args.grad_value.data = c.grad_value.data();
    args.grad_bias.data = c.grad_bias.data();
    args.sinks.data = c.sinks.data();
    args.grad_sinks.data = c.grad_sinks.data();
    args.seed = static_cast<const int64_t*>(c.seed.data());
  }

  // A mask of bytes in place of the bias.
  void hide_pairs() {
    Random random(12);
    c.bias = Tensor(DType::kBool, {kBatch, 1, kRows, kKeys});
    Values seen(c.bias.count());
    for (double& x : seen) x = chance(random, 0.7) ? 1 : 0;
    c.bias.set(seen);
    c.grad_bias = {};
    const int64_t shape[] = {kBatch, 1, kRows, kKeys};
    std::copy_n(shape, 4, args.bias_shape);
    args.bias_dtype = FLASH_ATTENTION_BIAS_MASK;
    point_at_tensors();
  }

  void add_sinks() {
    c.sinks = Tensor(DType::kFloat32, {kHeadsQ});
    c.sinks.set({0.5, -1, 2, 0});
    c.grad_sinks = Tensor(DType::kFloat32, {kHeadsQ});
    point_at_tensors();
  }

  void drop_pairs() {
    c.seed = Tensor(DType::kInt64, {});
    c.seed.set({12345});
    c.options.dropout_p = args.dropout_p = 0.4;
    point_at_tensors();
  }
};

// Every way to ask for the options that a call can do without.
Call with_options(DType dtype, bool mask, bool sinks, bool dropout) {
  Call call(dtype);
  if (mask) call.hide_pairs();
  if (sinks) call.add_sinks();
  if (dropout) call.drop_pairs();
  return call;
}

int run_c(const Call& call, DType dtype, Pass pass) {
  const bool half = dtype == DType::kFloat16;
  if (pass == Pass::kForward) {
    return half ? flash_attention_forward_fp16(&call.args)
                : flash_attention_forward_bf16(&call.args);
  }
  return half ? flash_attention_backward_fp16(&call.args)
              : flash_attention_backward_bf16(&call.args);
}

void run_cpp(const Case& c, Pass pass) {
  const auto plan = flashmoe::plan(c.problem(pass));
  CHECK(plan.ok(), plan.status().message());
  std::vector<std::byte> workspace(plan.value().workspace_bytes);
  const flashmoe::Status status = flashmoe::run(plan.value(), c.tensors(), workspace.data());
  CHECK(status.ok(), status.message());
}

// Bits of the results, which are then spoilt for the next run.
std::vector<std::vector<std::byte>> take_results(Case& c, Pass pass) {
  std::vector<std::vector<std::byte>> all;
  for (auto& [name, tensor] : c.results(pass)) {
    all.emplace_back(tensor->memory(), tensor->memory() + tensor->bytes());
    if (pass == Pass::kBackward) tensor->poison();  // out and lse are still needed
  }
  return all;
}

void check_refused(const flash_attention_args& args, int code, const char* said) {
  CHECK_EQ(flash_attention_forward_fp16(&args), code);
  CHECK_CONTAINS(flash_attention_last_error(), said);
}

}  // namespace

TEST(same_bits_as_cpp) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (int options = 0; options < 8; ++options) {
      Call call = with_options(dtype, options & 1, options & 2, options & 4);
      for (Pass pass : {Pass::kForward, Pass::kBackward}) {
        run_cpp(call.c, pass);
        const auto want = take_results(call.c, pass);
        CHECK_EQ(run_c(call, dtype, pass), FLASH_ATTENTION_OK);
        CHECK_EQ(std::string(flash_attention_last_error()), std::string());
        CHECK(take_results(call.c, pass) == want, "options", options);
      }
    }
  }
}

// Each of them changes the result, or a pointer that is passed on to nobody would not be noticed.
TEST(options_are_heard) {
  std::vector<std::vector<double>> outs;
  for (int options = 0; options < 8; ++options) {
    Call call = with_options(DType::kFloat16, options & 1, options & 2, options & 4);
    CHECK_EQ(flash_attention_forward_fp16(&call.args), FLASH_ATTENTION_OK);
    for (const auto& other : outs) CHECK(call.c.out.values() != other, "options", options);
    outs.push_back(call.c.out.values());
  }
  Call other = with_options(DType::kFloat16, false, false, true);
  other.c.seed.set({12346});
  CHECK_EQ(flash_attention_forward_fp16(&other.args), FLASH_ATTENTION_OK);
  CHECK(other.c.out.values() != outs[4]);
}

// (batch, length, heads, dim) memory through strides gives what the dense call gives.
TEST(strides) {
  Call call(DType::kFloat16);
  CHECK_EQ(flash_attention_forward_fp16(&call.args), FLASH_ATTENTION_OK);
  const Values want = call.c.out.values();

  Layout layout = dense_layout(4);
  layout.order = {0, 2, 1, 3};
  const auto relay = [&](Tensor& tensor, flash_attention_tensor& arg) {
    Tensor moved(tensor.spec().dtype, tensor.shape(), layout);
    moved.set(tensor.values());
    tensor = std::move(moved);
    std::copy_n(tensor.spec().stride.begin(), 4, arg.strides);
  };
  relay(call.c.query, call.args.query);
  relay(call.c.key, call.args.key);
  relay(call.c.value, call.args.value);
  relay(call.c.out, call.args.out);
  call.point_at_tensors();
  call.c.out.poison();
  CHECK_EQ(flash_attention_forward_fp16(&call.args), FLASH_ATTENTION_OK);
  CHECK(call.c.out.values() == want);
}

TEST(own_workspace) {
  Call call(DType::kBFloat16);
  CHECK_EQ(flash_attention_forward_bf16(&call.args), FLASH_ATTENTION_OK);
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    uint64_t bytes = 0;
    const int c_pass = pass == Pass::kForward ? FLASH_ATTENTION_FORWARD : FLASH_ATTENTION_BACKWARD;
    CHECK_EQ(flash_attention_workspace_bytes(&call.args, FLASH_ATTENTION_BF16, c_pass, &bytes), 0);
    CHECK_EQ(bytes, flashmoe::plan(call.c.problem(pass, 0)).value().workspace_bytes);
    std::unique_ptr<std::byte, decltype(&std::free)> memory(
        static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64 + 64)), std::free);
    call.args.workspace = memory.get();
    call.args.workspace_bytes = bytes;
    CHECK_EQ(run_c(call, DType::kBFloat16, pass), FLASH_ATTENTION_OK);
    call.args.workspace_bytes = bytes - 1;
    CHECK_EQ(run_c(call, DType::kBFloat16, pass), FLASH_ATTENTION_INVALID_ARGUMENT);
    CHECK_CONTAINS(flash_attention_last_error(), "workspace_bytes");
    call.args.workspace = memory.get() + 8;
    call.args.workspace_bytes = bytes;
    CHECK_EQ(run_c(call, DType::kBFloat16, pass), FLASH_ATTENTION_INVALID_ARGUMENT);
    CHECK_CONTAINS(flash_attention_last_error(), "aligned");
  }
}

TEST(wrong_calls_are_refused_by_name) {
  const int kInvalid = FLASH_ATTENTION_INVALID_ARGUMENT;
  CHECK_EQ(flash_attention_forward_fp16(nullptr), kInvalid);
  CHECK_CONTAINS(flash_attention_last_error(), "args");
  CHECK_EQ(flash_attention_args_init(nullptr, sizeof(flash_attention_args)), kInvalid);

  const auto refused = [&](auto spoil, int code, const char* said) {
    Call call(DType::kFloat16);
    spoil(call.args);
    check_refused(call.args, code, said);
  };
  using Args = flash_attention_args&;
  refused([](Args a) { a.struct_size = 8; }, kInvalid, "struct_size is 8");
  refused([](Args a) { a.query.data = nullptr; }, kInvalid, "query");
  refused([](Args a) { a.out.data = nullptr; }, kInvalid, "out");
  refused([](Args a) { a.bias.data = nullptr; }, kInvalid, "bias");
  refused([](Args a) { a.bias_shape[3] = 5; }, kInvalid, "bias");
  refused([](Args a) { a.bias_dtype = 3; }, kInvalid, "bias_dtype is 3");
  refused([](Args a) { a.bias_dtype = -1; }, kInvalid, "bias_dtype is -1");
  refused([](Args a) { a.dropout_p = 0.5; }, kInvalid, "seed is missing");
  refused([](Args a) { a.dropout_p = 1.5; }, kInvalid, "dropout_p");
  refused([](Args a) { a.heads_q = 5; }, kInvalid, "query has 5 heads");
  refused([](Args a) { a.head_dim = 0; }, kInvalid, "head dim 0");
  refused([](Args a) { a.head_dim_v = 1000; }, kInvalid, "1000");
  refused([](Args a) { a.len_k = -1; }, kInvalid, "key");
  refused([](Args a) { a.batch = a.len_q = int64_t{1} << 40; }, kInvalid, "query");
  refused([](Args a) { a.window_left = -3; }, kInvalid, "window");
  refused([](Args a) { a.scale = kInf; }, kInvalid, "scale");
  refused([](Args a) { a.softcap = -1; }, kInvalid, "softcap");
  refused([](Args a) { a.device = -2; }, kInvalid, "device is -2");
  refused([](Args a) { a.device = 0; }, FLASH_ATTENTION_UNSUPPORTED, "CUDA");
  const int32_t too_long[] = {23, 24};
  refused([&](Args a) { a.key_lengths = too_long; }, kInvalid, "key_lengths[1] is 24");

  Call mask = with_options(DType::kFloat16, true, false, false);
  mask.args.grad_bias.data = mask.c.grad_query.data();
  CHECK_EQ(flash_attention_backward_fp16(&mask.args), kInvalid);
  CHECK_CONTAINS(flash_attention_last_error(), "grad_bias");
  Call sinks(DType::kFloat16);
  sinks.args.grad_sinks.data = sinks.c.grad_query.data();
  CHECK_EQ(flash_attention_backward_fp16(&sinks.args), kInvalid);
  CHECK_CONTAINS(flash_attention_last_error(), "grad_sinks");

  Call call(DType::kFloat16);
  call.args.lse.data = nullptr;
  CHECK_EQ(flash_attention_backward_fp16(&call.args), kInvalid);
  CHECK_CONTAINS(flash_attention_last_error(), "lse");
  uint64_t bytes = 0;
  CHECK_EQ(flash_attention_workspace_bytes(&call.args, 7, 0, &bytes), kInvalid);
  CHECK_CONTAINS(flash_attention_last_error(), "dtype is 7");
  CHECK_EQ(flash_attention_workspace_bytes(&call.args, 0, 2, &bytes), kInvalid);
  CHECK_CONTAINS(flash_attention_last_error(), "pass is 2");
  CHECK_EQ(flash_attention_workspace_bytes(&call.args, 0, 0, nullptr), kInvalid);
  CHECK_CONTAINS(flash_attention_last_error(), "bytes");
}

// A struct of another version is neither read nor written beyond what the caller has.
TEST(init_writes_no_more_than_it_is_given) {
  std::vector<std::byte> small(16, std::byte{0x5A});
  auto* args = reinterpret_cast<flash_attention_args*>(small.data());
  CHECK_EQ(flash_attention_args_init(args, small.size()), FLASH_ATTENTION_INVALID_ARGUMENT);
  CHECK(small == std::vector<std::byte>(16, std::byte{0x5A}));
}

TEST(nothing_to_do) {
  flash_attention_args args;
  CHECK_EQ(flash_attention_args_init(&args, sizeof args), FLASH_ATTENTION_OK);
  args.heads_q = args.heads_k = 2;
  args.head_dim = args.head_dim_v = 8;
  args.len_k = 5;  // batch 0, no memory at all
  CHECK_EQ(flash_attention_forward_bf16(&args), FLASH_ATTENTION_OK);
  CHECK_EQ(std::string(flash_attention_last_error()), std::string());
  CHECK_EQ(flash_attention_backward_bf16(&args), FLASH_ATTENTION_OK);
  CHECK_EQ(std::string(flash_attention_last_error()), std::string());
}

TEST(each_thread_has_its_own_error) {
  CHECK_EQ(flash_attention_forward_fp16(nullptr), FLASH_ATTENTION_INVALID_ARGUMENT);
  std::string other = "?";
  std::thread([&] { other = flash_attention_last_error(); }).join();
  CHECK_EQ(other, std::string());
  CHECK_CONTAINS(flash_attention_last_error(), "args");
}

TEST(version_is_the_same) {
  CHECK_EQ(std::string(flash_attention_version()), std::string(flashmoe::version()));
}
